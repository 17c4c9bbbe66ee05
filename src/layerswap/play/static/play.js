"use strict";
// Text from models and files is only ever set as textContent.
const $ = id => document.getElementById(id);
let facts = null, gone = false, key = null, shown = null, asked = null, soon = 0;
let zones = { bottom: 0, top: 0, bottom_transition: 0, top_transition: 0 }, outside = "blend";
const described = new Map(), cards = new Map();
const pinned = new Set();

const make = (tag, className = "", text = "") => {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
};
const button = (text, act) => {
  const made = make("button", "", text);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
};
const percent = (share, digits = 1) => (100 * share).toFixed(digits);
function fail(error) {
  const line = error ? error.message ?? String(error) : facts?.state === "failed" ? facts.message : "";
  $("fault").textContent = line;
  $("fault").hidden = !line;
}
function say(text, state) {
  $("status").textContent = text;
  $("status").className = state ?? "";
}

// --- the server ---

async function request(path, options = {}) {
  const answer = await fetch(path, options).catch(error => { throw error.name === "AbortError" ? error : new Error("the server does not answer"); });
  if (answer.ok) return answer;
  const text = await answer.text();
  let data = { error: text.trim() };
  try { data = JSON.parse(text); } catch { /* a refusal is plain text */ }
  throw new Error(data.error || `the server answered ${answer.status}`);
}
async function* lines(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "", part = await reader.read(); !part.done; part = await reader.read()) {
    const found = (rest + part.value).split("\n");
    rest = found.pop();
    yield* found.map(line => JSON.parse(line));
  }
}
async function watch() {
  try {
    const found = await (await request("api/status")).json();
    if (gone || found.state !== facts?.state) learn(found);
    else if (!facts.change && found.change) { facts = found; draw(); }
    gone = false;
  } catch {
    gone = true;
    say("the server is gone; trying again", "failed");
    asked?.abort();
  }
  setTimeout(watch, 1000);
}
function learn(event) {
  facts = event;
  say(...{ ready: ["ready", "ready"], loading: ["loading the model", "busy"], failed: ["not loaded", "failed"] }[facts.state]);
  fail();
  $("experts").replaceChildren(...facts.experts.map((expert, i) => {
    const item = make("li"), swatch = make("i", `e${i % 8}`);
    item.append(swatch, expert.label, make("span", "", expert.source ? ` ${expert.source}` : ""));
    return item;
  }));
  $("presets").replaceChildren(...Object.entries(facts.presets).map(([label, preset]) => {
    const made = button(label, () => go(preset));
    made.dataset.key = preset;
    return made;
  }));
  const offered = facts.prompts.map((one, i) => new Option(one.prompt.slice(0, 90), i));
  $("prompts").replaceChildren(new Option("a prompt of my own", ""), ...offered);
  $("offer").hidden = !offered.length;
  $("chat-label").hidden = !facts.chats;
  if (!key) {
    $("length").value = facts.length;
    go(location.hash.slice(1) || facts.start).catch(() => go(facts.start));
  } else draw();
  const at = facts.prompts.findIndex(one => one.prompt === $("prompt").value);
  if (offered.length && (at >= 0 || !$("prompt").value)) take(Math.max(0, at));
  if (facts.state === "ready" && $("prompt").value && !cards.size && $("again").checked) ask();
}

// --- the composition ---

async function describe(one) {
  if (!described.has(one)) described.set(one, await (await request(`api/composition?key=${encodeURIComponent(one)}`)).json());
  return described.get(one);
}
async function go(next, asks = $("again").checked) {
  const before = key;
  key = next;
  let found;
  try { found = await describe(next); } catch (error) {
    if (key === next) key = before;
    if (key) history.replaceState(null, "", `#${key}`);
    fail(error);
    throw error;
  }
  if (key !== next) return;
  fail();
  shown = found;
  if (found.zones) [zones, outside] = [{ ...found.zones }, found.outside];
  history.replaceState(null, "", `#${next}`);
  draw();
  if (before && before !== next && asks && $("prompt").value) askSoon();
}
const swapKey = sizes => ["swap", sizes.bottom, sizes.top, sizes.bottom_transition, sizes.top_transition, outside].join(".");
const move = changes => go(swapKey({ ...zones, ...changes })).catch(() => draw());
const room = name => facts.layers - Object.entries(zones).reduce((sum, [other, count]) => sum + (other === name ? 0 : count), 0);

function strip(target, description) {
  const layers = description.rows.filter(row => /^\d+$/.test(row.label)).reverse();
  target.replaceChildren(...layers.map(row => {
    const shares = {};
    for (const part of row.parts) for (const [name, share] of Object.entries(part.shares)) shares[name] = (shares[name] ?? 0) + share / row.parts.length;
    const cell = make("i"), names = Object.keys(shares);
    let at = 0;
    const stops = names.map(name => `${colour(name)} ${100 * at}% ${100 * (at += shares[name])}%`);
    cell.style.background = names.length > 1 ? `linear-gradient(${stops.join(",")})` : colour(names[0]);
    return cell;
  }));
}
const number = name => Math.max(0, facts.experts.findIndex(expert => expert.name === name)) % 8;
const colour = name => `var(--e${number(name)})`;

function bar(row) {
  const made = make("div", "bar");
  for (const part of row.parts) {
    const box = make("div", "part");
    for (const [name, share] of Object.entries(part.shares)) {
      const segment = make("i", `e${number(name)}`);
      segment.style.flexGrow = share;
      box.append(segment);
    }
    box.title = `${row.label}: ${part.roles.join(", ")} ${Object.entries(part.shares).map(([name, share]) => `${percent(share, 0)}% ${name}`).join(", ")}`;
    made.append(box);
  }
  return made;
}
function changes(layer) {
  const made = make("div", "change");
  if (!facts.change) return made;
  const most = Math.max(...Object.values(facts.change).flat(), 1e-9);
  const words = [];
  for (const [name, shares] of Object.entries(facts.change)) {
    const line = make("i", `e${number(name)}`);
    line.style.width = `${100 * shares[layer] / most}%`;
    made.append(line);
    words.push(`${name} ${percent(shares[layer])}%`);
  }
  made.title = `layer ${layer}, rows that fine-tuning changed: ${words.join(", ")}`;
  return made;
}
function draw() {
  if (!shown) return;
  const height = Math.max(10, Math.min(30, 340 / facts.layers));
  $("stack").style.setProperty("--h", `${height}px`);
  let layers = $("stack").querySelector(".layers");
  if (!layers) {
    layers = make("div", "layers");
    layers.append(make("div", "rows"), handle("top"), handle("bottom"));
    $("stack").append(make("div", "above"), layers, make("div", "below"));
  }
  const above = [], inside = [], below = [];
  for (const row of shown.rows) {
    const isLayer = /^\d+$/.test(row.label), made = make("div", isLayer ? "row" : "row out");
    made.setAttribute("aria-hidden", "true");
    if (isLayer) made.append(make("span", "", height > 13 || row.label % 4 === 0 ? row.label : ""), bar(row), changes(+row.label));
    else made.append(bar(row), make("span", "", row.label));
    (isLayer ? inside : inside.length ? below : above).push(made);
  }
  $("stack").querySelector(".above").replaceChildren(...above);
  layers.firstChild.replaceChildren(...inside);
  $("stack").querySelector(".below").replaceChildren(...below);
  for (const name of ["top", "bottom"]) {
    const grip = layers.querySelector(`.handle.${name}`), count = zones[name];
    grip.style.top = `${height * (name === "top" ? count : facts.layers - count)}px`;
    grip.classList.toggle("off", !shown.zones);
    grip.setAttribute("aria-valuenow", count);
    grip.setAttribute("aria-valuemax", room(name));
    grip.setAttribute("aria-valuetext", `${count} ${name} layers from the language expert`);
    grip.firstChild.textContent = `${name} ${count}`;
  }
  for (const name of ["bottom_transition", "top_transition"]) {
    $(name).value = zones[name];
    $(name).max = room(name);
  }
  for (const radio of document.querySelectorAll("[name=outside]")) radio.checked = radio.value === outside;
  for (const preset of $("presets").children) preset.setAttribute("aria-pressed", preset.dataset.key === key);
  $("sentence").textContent = shown.sentence;
  $("live").lastElementChild.textContent = shown.words;
  strip($("live").firstElementChild, shown);
  $("recipe").textContent = shown.recipe.trimEnd();
  drawAnswers();
}
function handle(name) {
  const grip = make("div", `handle ${name}`);
  grip.append(make("span"));
  grip.tabIndex = 0;
  for (const [attribute, value] of [["role", "slider"], ["aria-orientation", "vertical"], ["aria-valuemin", 0], ["aria-label", `${name} layers`]]) grip.setAttribute(attribute, value);
  const set = count => move({ [name]: Math.max(0, Math.min(room(name), count)) });
  const grows = name === "top" ? "ArrowDown" : "ArrowUp";  // where the line goes
  grip.addEventListener("keydown", event => {
    const counts = { ArrowRight: zones[name] + 1, ArrowLeft: zones[name] - 1, Home: 0, End: room(name) };
    if (event.key === "ArrowUp" || event.key === "ArrowDown") counts[event.key] = zones[name] + (event.key === grows ? 1 : -1);
    if (!(event.key in counts)) return;
    event.preventDefault();
    set(counts[event.key]);
  });
  grip.addEventListener("pointerdown", event => {
    grip.setPointerCapture(event.pointerId);
    grip.classList.add("held");
    grip.focus();
    event.preventDefault();
  });
  grip.addEventListener("pointermove", event => {
    if (!grip.hasPointerCapture(event.pointerId)) return;
    const box = grip.parentElement.getBoundingClientRect(), at = Math.round((event.clientY - box.top) / box.height * facts.layers);
    const count = Math.max(0, Math.min(room(name), name === "top" ? at : facts.layers - at));
    if (count !== zones[name]) set(count);
  });
  for (const end of ["pointerup", "pointercancel"]) grip.addEventListener(end, () => grip.classList.remove("held"));
  return grip;
}

// --- answers ---

const take = index => { [$("prompts").value, $("prompt").value] = [index, facts.prompts[index].prompt]; };
const answer = () => facts.prompts.find(one => one.prompt === $("prompt").value)?.answer?.trim();
const askSoon = () => { clearTimeout(soon); soon = setTimeout(ask, 120); };
async function ask() {
  if (facts?.state !== "ready" || !$("ask").reportValidity()) return;
  asked?.abort();
  const compositions = [...new Set([key, "task", "language", ...pinned])].slice(0, 8), mine = key;
  const known = answer();
  $("known").hidden = known === undefined;
  $("known").textContent = known === undefined ? "" : `Answer in the data: ${known}`;
  cards.clear();
  for (const one of compositions) cards.set(one, { text: "", waiting: true, live: one === mine, known });
  drawAnswers();
  $("stop").disabled = false;
  const current = asked = new AbortController();
  const heard = (event, ended) => {
    if (asked !== current) return;
    if (event.type === "failed") fail(event.message);
    for (const [one, text] of Object.entries(event.texts ?? {})) cards.get(one).text = text;
    for (const [one, answer] of Object.entries(event.answers ?? {})) Object.assign(cards.get(one), answer);
    if (event.type === "answered") $("speed").textContent = `First token after ${(1000 * event.first_s).toFixed(0)} ms, all after ${event.seconds.toFixed(2)} s.`;
    if (event.type === "answered" || ended) for (const card of cards.values()) [card.waiting, card.cut] = [false, !card.tokens];
    if (ended) {
      [asked, $("stop").disabled] = [null, true];
      if (!gone) say("ready", "ready");
    }
    drawAnswers();
  };
  try {
    const body = { prompt: $("prompt").value, compositions, temperature: +$("temperature").value, seed: +$("seed").value, length: +$("length").value, chat: !$("chat-label").hidden && $("chat").checked };
    fail();
    say("working", "busy");
    const options = { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), signal: current.signal };
    for await (const event of lines(await request("api/ask", options))) heard(event);
  } catch (error) {
    if (!current.signal.aborted) fail(error);
  }
  heard({}, true);
}
// Words of one text that are not in the longest common subsequence with another.
function marked(text, other) {
  const a = text.split(/(\s+)/).slice(0, 800), b = other.split(/(\s+)/).slice(0, 800);
  const length = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--) for (let j = b.length - 1; j >= 0; j--)
    length[i][j] = a[i] === b[j] ? length[i + 1][j + 1] + 1 : Math.max(length[i + 1][j], length[i][j + 1]);
  const found = [];
  for (let i = 0, j = 0; i < a.length;) {
    if (j < b.length && a[i] === b[j]) { found.push(a[i++]); j++; }
    else if (j < b.length && length[i][j + 1] > length[i + 1][j]) j++;
    else found.push(/\S/.test(a[i]) ? make("mark", "", a[i++]) : a[i++]);
  }
  return [...found, text.split(/(\s+)/).slice(800).join("")];
}
function drawAnswers() {
  const live = [...cards].find(([, card]) => card.live)?.[1];
  const held = document.activeElement?.closest?.("#answers button"), place = held?.matches(":last-child") ? "last-of-type" : "first-of-type";
  $("about-answers").hidden = !cards.size;
  const order = ["task", "language", ...cards.keys()].filter((one, i, all) => cards.has(one) && all.indexOf(one) === i);
  $("answers").replaceChildren(...order.map(one => {
    const card = cards.get(one), made = make("article", `answer${card.live ? " live" : ""}${card.waiting ? " waiting" : ""}`);
    made.dataset.key = one;
    const head = make("h3"), line = make("span", "strip"), text = make("p", "text"), foot = make("footer");
    head.append(line, make("span", "", described.get(one)?.words ?? one));
    if (described.has(one)) strip(line, described.get(one));
    else describe(one).then(drawAnswers, () => {});
    text.dir = "auto";
    text.append(...(live && !card.live && !card.waiting && !live.waiting ? marked(card.text, live.text) : [card.text]));
    if (card.cut) foot.append(make("span", "", "stopped"));
    else if (card.known !== undefined && !card.waiting) {
      const right = card.text.trim() === card.known;
      foot.append(make("span", right ? "right" : "wrong", right ? "✓ right" : "✗ not the answer"));
    }
    if (card.tokens) foot.append(make("span", "", `${card.tokens.length} tokens`));
    if (card.live && one !== key) foot.append(make("span", "", "asked before the move"));
    if (one !== key) foot.append(button("Go there", () => go(one)));
    if (!["task", "language"].includes(one)) foot.append(button(pinned.has(one) ? "Unpin" : "Pin", () => {
      if (!pinned.delete(one)) pinned.add(one);
      drawAnswers();
    }));
    made.append(head, text, foot);
    return made;
  }));
  if (held) $("answers").querySelector(`[data-key="${held.closest("article").dataset.key}"] button:${place}`)?.focus();
}

// --- at home ---

for (const copy of document.querySelectorAll("[data-copy]")) {
  const label = copy.innerHTML;
  copy.addEventListener("click", async () => {
    const what = copy.dataset.copy;
    try { await navigator.clipboard.writeText(what === "link" ? location.href : $(what).textContent); } catch {
      return fail("the browser does not allow copying; select the text");
    }
    copy.textContent = "Copied";
    setTimeout(() => { copy.innerHTML = label; }, 1200);
  });
}
$("ask").addEventListener("submit", event => { event.preventDefault(); ask(); });
$("prompt").addEventListener("keydown", event => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); ask(); } });
$("stop").addEventListener("click", () => asked?.abort());
$("prompts").addEventListener("change", () => { if ($("prompts").value) { take(+$("prompts").value); ask(); } });
$("next").addEventListener("click", () => { take((+($("prompts").value || -1) + 1) % facts.prompts.length); ask(); });
for (const name of ["bottom_transition", "top_transition"]) $(name).addEventListener("change", () => move({ [name]: Math.max(0, Math.min(room(name), Math.round(+$(name).value))) }));
for (const radio of document.querySelectorAll("[name=outside]")) radio.addEventListener("change", () => { outside = radio.value; move({}); });
addEventListener("hashchange", () => { const next = location.hash.slice(1); if (next && next !== key) go(next).catch(() => {}); });
watch();
