// Tables are sorted by a click, or Enter, on a heading; a third one gives the first order back.
for (const table of document.querySelectorAll(".table table")) {
  const body = table.tBodies[0], order = [...body.rows];
  if (order.length < 2) continue;
  const value = (row, column) => {
    const cell = row.cells[column], words = cell.dataset.value ?? cell.textContent.trim();
    const number = parseFloat(words.replace("\u2212", "-"));
    return Number.isNaN(number) ? words : number;
  };
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "sort";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = { none: "descending", descending: "ascending", ascending: "none" }[head.ariaSort ?? "none"];
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      if (next !== "none") head.setAttribute("aria-sort", next);
      const sign = next === "ascending" ? 1 : -1;
      const rows = next === "none" ? order : [...order].sort((a, b) => {
        const x = value(a, column), y = value(b, column);
        if (typeof x === typeof y) return sign * (x < y ? -1 : x > y ? 1 : 0);
        return typeof x === "number" ? -1 : 1;  // what is no number comes last
      });
      body.append(...rows);
    });
  });
}
