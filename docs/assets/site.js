/* What scrolls by itself must be reached by the keyboard, and the search needs a name. */
addEventListener("load", () => {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const part of document.querySelectorAll(".md-typeset__scrollwrap, math[display=block]")) {
    if (part.scrollWidth > part.clientWidth) part.setAttribute("tabindex", "0");
  }
});
