"""The mathematics of spectral filters, without hooks: components, gains, the filter itself."""
