panels.maps = root => {
  const $ = part(root), data = dataOf(root), RAMPS = rampsOf(data.colours);
  const mode = () => data.modes[+$("mode").value];
  // The fraction of a cell, and the words for it.
  function oneExpert(index, step) {
    const above = mode().above[index];
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
  function table(title, read, stops, scale) {
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
        const shade = colour(stops, scale(found.x));
        cell.textContent = percent(found.x, 0);
        cell.dataset.words = `${title}, layer ${layer}, ${data.labels[i]}: ${percent(found.x, 2)}% (${found.words})`;
        cell.style.background = rgb(shade);
        cell.style.color = ink(shade);
      });
    }
    body.rows[0].cells[1].tabIndex = 0;
    return map;
  }
  function draw() {
    const step = +$("threshold").value, left = +$("left").value, right = $("right").value;
    const named = i => `${data.experts[i]}, rows above ${mode().thresholds[i][step].toExponential(2)}`;
    $("value").textContent = mode().positions[step];
    $("threshold").setAttribute("aria-valuetext", $("value").textContent);
    const ramp = RAMPS[night.matches ? "dark" : "light"];
    const compared = right.startsWith("less ");
    const stops = compared ? (night.matches ? DARK : LIGHT) : ramp;
    const maps = [];
    let span = 1;
    if (compared) {
      const other = +right.slice(5), read = difference(left, other, step);
      // The scale ends at the largest difference, or small ones could not be seen.
      span = Math.max(0.01, ...Object.keys(data.rows).map(key => Math.abs(read(key).x)));
      maps.push(table(`${data.experts[left]} less ${data.experts[other]}`, read, stops, x => (x / span + 1) / 2));
    } else {
      for (const index of right ? [left, +right] : [left])
        maps.push(table(named(index), oneExpert(index, step), stops, x => x));
    }
    $("maps").replaceChildren(...maps);
    $("legend").style.background = `linear-gradient(to right, ${stops.map(rgb).join(",")})`;
    $("low").textContent = compared ? `${percent(-span, 0)}%` : "0%";
    $("high").textContent = `${percent(span, 0)}% of rows`;
    $("detail").textContent = "Point at a cell, or walk with the arrow keys, to read its numbers.";
  }
  walkable($("maps"), $("detail"));
  data.experts.forEach((name, i) => $("left").add(new Option(name, i)));
  $("right").add(new Option("nothing", ""));
  data.experts.forEach((name, i) => $("right").add(new Option(name, i)));
  if (data.experts.length > 1) {
    data.experts.forEach((name, i) => $("right").add(new Option(`difference from ${name}`, `less ${i}`)));
    $("right").value = "1";
  }
  function start() {
    $("threshold").max = mode().positions.length - 1;
    $("threshold").value = mode().start;
  }
  data.modes.forEach((one, i) => $("mode").add(new Option(one.name, i)));
  $("mode").value = data.mode;
  $("mode").addEventListener("input", () => { start(); draw(); });
  start();
  for (const id of ["threshold", "left", "right", "numbers"]) $(id).addEventListener("input", draw);
  night.addEventListener("change", draw);
  // #difference and #numbers open the page so.
  if (location.hash.includes("numbers")) $("numbers").checked = true;
  if (location.hash.includes("difference") && data.experts.length > 1) $("right").value = "less 1";
  draw();
};
