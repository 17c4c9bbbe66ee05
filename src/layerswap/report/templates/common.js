"use strict";
// Shared by the panels; each fills one element with data-panel="<its name>".
const panels = {};
const dataOf = root => JSON.parse(root.querySelector("script[type='application/json']").textContent);
const part = root => name => root.querySelector(`[data-role=${name}]`);
const night = matchMedia("(prefers-color-scheme: dark)");
const channels = hex => [1, 3, 5].map(i => parseInt(hex.slice(i, i + 2), 16));
// Purple to green through grey for differences: safe for colour-blind readers.
const LIGHT = [[118,42,131],[175,141,195],[231,212,232],[238,238,238],[217,240,211],[127,191,123],[27,120,55]];
const DARK = [[231,190,240],[160,110,180],[84,54,96],[44,48,54],[42,82,58],[84,150,96],[178,232,178]];
function colour(stops, x) {
  const at = Math.min(stops.length - 1, Math.max(0, x * (stops.length - 1)));
  const i = Math.min(stops.length - 2, Math.floor(at)), part = at - i;
  return stops[i].map((c, k) => Math.round(c + part * (stops[i + 1][k] - c)));
}
// Whichever of black and white stands out more (WCAG 2).
const ink = shade => {
  const [r, g, b] = shade.map(c => (c / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000" : "#fff";
};
const rgb = c => `rgb(${c.join(",")})`;
const minus = text => text.replace("-", "\u2212");
const percent = (x, digits) => minus((100 * x).toFixed(digits)).replace(/^\u2212(0\.?0*)$/, "$1");
const rampsOf = colours => ({ light: colours.light.map(channels), dark: colours.dark.map(channels) });
// Arrow keys walk over the cells of the tables in an element; what is pointed at is told below.
const MOVES = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
function walkable(cells, detail) {
  cells.addEventListener("keydown", event => {
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
  const show = event => {
    const cell = event.target.closest("td");
    if (cell && cell.dataset.words) detail.textContent = cell.dataset.words;
  };
  cells.addEventListener("focusin", show);
  cells.addEventListener("pointerover", show);
}
