panels.grid = root => {
  const $ = part(root), data = dataOf(root), ramps = rampsOf(data.colours);
  const values = data.cells.map(cell => cell.score);
  const low = Math.min(...values), high = Math.max(...values);
  function draw() {
    const kind = data.transitions[+$("transitions").value];
    const stops = ramps[night.matches ? "dark" : "light"];
    const here = data.cells.filter(cell => cell.transitions === kind);
    const rows = [...new Set(here.map(cell => cell.bottom))].sort((a, b) => b - a);
    const columns = [...new Set(here.map(cell => cell.top))].sort((a, b) => a - b);
    const map = document.createElement("table");
    map.className = "map wide";
    map.setAttribute("role", "grid");
    map.createCaption().textContent = data.title;
    const head = map.createTHead().insertRow();
    head.appendChild(document.createElement("th")).textContent = "bottom \\ top";
    for (const top of columns) {
      const cell = head.appendChild(document.createElement("th"));
      cell.scope = "col";
      cell.textContent = top;
    }
    const body = map.createTBody();
    for (const bottom of rows) {
      const row = body.insertRow(), name = row.appendChild(document.createElement("th"));
      name.scope = "row";
      name.textContent = bottom;
      for (const top of columns) {
        const cell = row.insertCell(), found = here.find(one => one.bottom === bottom && one.top === top);
        cell.tabIndex = -1;
        if (!found) continue;
        const shade = colour(stops, high > low ? (found.score - low) / (high - low) : 0.5);
        cell.textContent = percent(found.score, 1) + (found.mark ? " *" : "");
        cell.dataset.words = `bottom ${bottom}, top ${top}, transitions ${kind}: ${found.words}` +
          (found.mark ? `; ${found.mark}` : "");
        cell.style.background = rgb(shade);
        cell.style.color = ink(shade);
      }
    }
    body.rows[0].cells[1].tabIndex = 0;
    $("maps").replaceChildren(map);
    $("value").textContent = kind;
    $("transitions").setAttribute("aria-valuetext", kind);
    $("legend").style.background = `linear-gradient(to right, ${stops.map(rgb).join(",")})`;
    $("low").textContent = `${percent(low, 1)}%`;
    $("high").textContent = `${percent(high, 1)}%`;
    $("detail").textContent = "Point at a cell, or walk with the arrow keys, to read its numbers.";
  }
  walkable($("maps"), $("detail"));
  $("transitions").max = data.transitions.length - 1;
  const marked = data.cells.find(cell => cell.mark);
  $("transitions").value = marked ? data.transitions.indexOf(marked.transitions) : 0;
  $("transitions").disabled = data.transitions.length < 2;
  $("transitions").addEventListener("input", draw);
  night.addEventListener("change", draw);
  draw();
};
