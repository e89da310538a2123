"use strict";
(function () {
  function key(row, column) {
    return row.cells[column].dataset.sort;
  }
  function compare(a, b, numeric) {
    return numeric ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true });
  }
  function sortBy(button) {
    const head = button.closest("th");
    const body = head.closest("table").tBodies[0];
    const column = head.cellIndex;
    const numeric = head.classList.contains("n");
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const rows = Array.from(body.rows);
    rows.sort((a, b) => (down ? -1 : 1) * compare(key(a, column), key(b, column), numeric));
    body.append(...rows);
  }
  function filter(input) {
    const table = document.getElementById(input.dataset.table);
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of table.tBodies[0].rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
      shown += row.hidden ? 0 : 1;
    }
    const count = document.getElementById(input.dataset.table + "-count");
    count.textContent = shown + " of " + table.tBodies[0].rows.length + " rows";
  }
  for (const button of document.querySelectorAll("th button")) {
    button.addEventListener("click", () => sortBy(button));
  }
  for (const box of document.querySelectorAll(".filter")) {
    box.hidden = false;
    const input = box.querySelector("input");
    input.addEventListener("input", () => filter(input));
  }
  window.addEventListener("beforeprint", () => {
    for (const item of document.querySelectorAll("details")) item.open = true;
  });
})();
