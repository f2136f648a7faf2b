// Name each cell of a table by its column, for the cards that extra.css makes of tables of text on a phone.
for (const table of document.querySelectorAll(".md-typeset table")) {
  const columns = [...table.querySelectorAll("th")].map((cell) => cell.textContent);
  for (const row of table.querySelectorAll("tbody tr")) {
    [...row.cells].forEach((cell, nth) => (cell.dataset.column = columns[nth]));
  }
}
