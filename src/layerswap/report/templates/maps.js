"use strict";
// Fills each element with data-panel="maps". CSS colours a cell by its --share and its class.
const percent = (x, digits) => (100 * x).toFixed(digits).replace(/^-(0\.?0*)$/, "$1").replace("-", "\u2212");
// Arrow keys walk over the cells of the tables; the cell under the pointer is described below them.
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const HIGH = 0.732;  // as drawing.HIGH
for (const root of document.querySelectorAll("[data-panel=maps]")) {
  const $ = name => root.querySelector(`[data-role=${name}]`);
  const data = JSON.parse(root.querySelector("script").textContent);
  // The fraction of a cell, and the words for it.
  function oneExpert(index, step) {
    const above = data.above[index];
    return key => key in data.rows ? {
      x: above[key][step] / data.rows[key],
      words: `${above[key][step]} of ${data.rows[key]} rows above`,
    } : null;
  }
  function difference(a, b, step) {
    const one = oneExpert(a, step), two = oneExpert(b, step);
    return key => {
      const p = one(key), q = two(key);
      return p && { x: p.x - q.x, words: `${percent(p.x, 1)}% against ${percent(q.x, 1)}%` };
    };
  }
  function table(title, read, span) {
    const map = document.createElement("table");
    map.className = "map" + ($("numbers").checked ? "" : " plain");
    map.setAttribute("role", "grid");
    map.createCaption().textContent = title;
    const head = map.createTHead().insertRow();
    head.appendChild(document.createElement("th")).textContent = "layer";
    for (const label of data.labels) {
      const cell = head.appendChild(document.createElement("th"));
      cell.scope = "col";
      const [own, papers] = label.split(" ");
      cell.textContent = own;
      if (papers) cell.appendChild(document.createElement("small")).textContent = papers;
    }
    const body = map.createTBody();
    for (let layer = data.layers - 1; layer >= 0; layer--) {
      const row = body.insertRow();
      const name = row.appendChild(document.createElement("th"));
      name.scope = "row";
      name.textContent = layer;
      data.columns.forEach((column, i) => {
        const cell = row.insertCell(), found = read(`${layer} ${column}`);
        cell.tabIndex = -1;
        if (!found) return;
        const share = Math.abs(found.x) / span;
        cell.textContent = percent(found.x, 0);
        cell.dataset.words = `${title}, layer ${layer}, ${data.labels[i]}: ${percent(found.x, 2)}% (${found.words})`;
        cell.className = (found.x < 0 ? "less " : "more ") + (share > HIGH ? "high" : "");
        cell.style.setProperty("--share", share);
      });
    }
    body.rows[0].cells[1].tabIndex = 0;
    return map;
  }
  function draw() {
    const step = +$("threshold").value, left = +$("left").value, right = $("right").value;
    const named = i => `${data.experts[i]}, rows above ${data.thresholds[i][step].toExponential(2)}`;
    $("value").textContent = data.positions[step];
    $("threshold").setAttribute("aria-valuetext", $("value").textContent);
    const compared = right.startsWith("less ");
    const maps = [];
    let span = 1;
    if (compared) {
      const other = +right.slice(5), read = difference(left, other, step);
      // The scale ends at the largest difference, or small ones could not be seen.
      span = Math.max(0.01, ...Object.keys(data.rows).map(key => Math.abs(read(key).x)));
      maps.push(table(`${data.experts[left]} less ${data.experts[other]}`, read, span));
    } else {
      for (const index of right ? [left, +right] : [left])
        maps.push(table(named(index), oneExpert(index, step), span));
    }
    $("maps").replaceChildren(...maps);
    $("legend").className = compared ? "legend compared" : "legend";
    $("low").textContent = compared ? `${percent(-span, 0)}%` : "0%";
    $("high").textContent = `${percent(span, 0)}% of rows`;
    $("detail").textContent = "Point at a cell, or walk with the arrow keys, to read its numbers.";
  }
  const describe = event => {
    const cell = event.target.closest("td");
    if (cell && cell.dataset.words) $("detail").textContent = cell.dataset.words;
  };
  $("maps").addEventListener("focusin", describe);
  $("maps").addEventListener("pointerover", describe);
  $("maps").addEventListener("keydown", event => {
    const move = MOVES[event.key], cell = event.target.closest("td");
    if (!move || !cell) return;
    event.preventDefault();
    const row = cell.parentElement.parentElement.rows[cell.parentElement.rowIndex - 1 + move[0]];
    const next = row && row.cells[cell.cellIndex + move[1]];
    if (!next || next.tagName !== "TD") return;
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  data.experts.forEach((name, i) => $("left").add(new Option(name, i)));
  $("right").add(new Option("nothing", ""));
  data.experts.forEach((name, i) => $("right").add(new Option(name, i)));
  if (data.experts.length > 1) {
    data.experts.forEach((name, i) => $("right").add(new Option(`difference from ${name}`, `less ${i}`)));
    $("right").value = "1";
  }
  $("slider").textContent = data.slider;
  $("threshold").max = data.positions.length - 1;
  $("threshold").value = data.start;
  for (const role of ["threshold", "left", "right", "numbers"]) $(role).addEventListener("input", draw);
  draw();
}
