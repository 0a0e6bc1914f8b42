"""Foreign files, damaged at random: what is read, how it is damaged, and what comes of it."""
