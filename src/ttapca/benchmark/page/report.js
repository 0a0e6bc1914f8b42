// Sort a table by the column whose head is chosen, with mouse or keyboard. What has no number
// (failed, not measured) stays at the end, whichever way the numbers run.
"use strict";
for (const table of document.querySelectorAll("table[data-sortable]")) {
  const heads = [...table.tHead.rows[0].cells];
  const body = table.tBodies[0];
  const key = (row, at) => {
    const cell = row.cells[at];
    return cell.classList.contains("text") ? cell.textContent : cell.dataset.value;
  };
  heads.forEach((head, at) => {
    head.querySelector("button").addEventListener("click", () => {
      const rising = head.getAttribute("aria-sort") !== "ascending";
      const sign = rising ? 1 : -1;
      const words = head.classList.contains("words");
      const rows = [...body.rows].sort((one, two) => {
        const [a, b] = [key(one, at), key(two, at)];
        if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
        return sign * (words ? a.localeCompare(b) : a - b);
      });
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      body.append(...rows);
    });
  });
}
