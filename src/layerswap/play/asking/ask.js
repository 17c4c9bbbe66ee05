"use strict";
// Texts of files and models are only ever set as textContent.
const $ = id => document.getElementById(id);
const asked = JSON.parse($("asked").textContent);
const store = `layerswap-ask-${asked.study}`;
let lines = [], speaker = "", at = null;

const make = (tag, className, text) => Object.assign(document.createElement(tag), { className, textContent: text });
function fail(error) {
  $("fault").textContent = error?.message ?? error ?? "";
  $("fault").hidden = !error;
}
// The answers of this speaker by item; a line without an answer takes the item back.
function given() {
  const found = new Map();
  for (const line of lines) {
    if (line.speaker !== speaker) continue;
    found.delete(line.item);
    if (line.answer !== null) found.set(line.item, line);
  }
  return found;
}
function keep(answer, more = {}) {
  const item = more.item ?? asked.items[at].id;
  const line = { study: asked.study, page: asked.page, speaker, item, answer, time: new Date().toISOString(), ...more };
  try {
    localStorage.setItem(store, JSON.stringify([...lines, line]));
    lines.push(line);
    fail();
  } catch (error) {
    fail(`This answer was not kept: ${error.message}. Try again.`);
  }
  show();
}
// The sides change with the speaker, so that a habit of one side shows.
function flipped(number) {
  let sum = number;
  for (const letter of speaker) sum = (sum * 31 + letter.codePointAt(0)) % 9973;
  return sum % 2;
}
function choices() {
  const item = asked.items[at];
  if (asked.kind === "label") return asked.labels.map(label => [label, () => keep(label)]);
  if (asked.kind === "answer") return [["Keep this answer", () => $("written").value.trim() ? keep($("written").value.trim()) : fail("Write an answer, or skip.")]];
  const left = flipped(item.flip);
  return [["The first is better", () => keep(left)], ["The second is better", () => keep(1 - left)],
          ["Equally good", () => keep("equal")], ["Both bad", () => keep("bad")]];
}
function show() {
  const found = given();
  at = asked.items.findIndex(item => !found.has(item.id));
  $("progress").textContent = `${found.size} of ${asked.items.length}`;
  $("begin").hidden = true;
  $("ask").hidden = at < 0;
  $("done").hidden = at >= 0;
  $("saving").hidden = !lines.length;
  if (at < 0) return $("save").focus();
  const item = asked.items[at];
  $("text").textContent = item.text;
  $("written").hidden = asked.kind !== "answer";
  $("written").value = item.reference ?? "";
  const shown = item.answers ? (flipped(item.flip) ? [...item.answers].reverse() : item.answers) : [];
  $("answers").replaceChildren(...shown.map(text => Object.assign(make("div", "card", text), { dir: "auto" })));
  $("choices").replaceChildren(...choices().map(([text, act], i) => {
    const button = make("button", "", asked.kind === "answer" ? text : `${i + 1}  ${text}`);
    button.type = "button";
    button.dir = "auto";
    button.addEventListener("click", act);
    return button;
  }));
  (asked.kind === "answer" ? $("written") : $("text")).focus();
}
function undo() {
  const last = [...given().keys()].at(-1);
  if (last) keep(null, { item: last });
}
document.addEventListener("keydown", event => {
  if ($("ask").hidden && $("done").hidden) return;
  const writes = event.target === $("written");
  if (event.key === "Enter" && writes && (event.ctrlKey || event.metaKey)) choices()[0][1]();
  if (writes || event.ctrlKey || event.metaKey || event.altKey) return;
  const number = Number(event.key);
  if (event.key === "u") undo();
  else if (at < 0 || asked.kind === "answer") return;
  else if (event.key === "s") keep("", { skipped: true });
  else if (number >= 1 && number <= Math.min(9, choices().length)) choices()[number - 1][1]();
});
$("skip").addEventListener("click", () => keep("", { skipped: true }));
$("undo").addEventListener("click", undo);
$("begin").addEventListener("submit", event => {
  event.preventDefault();
  speaker = $("speaker").value.trim();
  if (speaker) show();
});
$("save").addEventListener("click", () => {
  const own = lines.filter(line => line.speaker === speaker);  // a file has one speaker
  const text = own.map(line => JSON.stringify(line) + "\n").join("");
  const link = make("a", "", "");
  link.href = URL.createObjectURL(new Blob([text], { type: "application/jsonl" }));
  link.download = `answers-${asked.study}-${speaker.replace(/[^\p{L}\p{N}]+/gu, "-")}.jsonl`;
  link.click();
  $("saved").textContent = `Saved ${link.download}. Send this file back.`;
});
$("title").textContent = asked.title;
$("about").textContent = asked.about;
try {
  lines = JSON.parse(localStorage.getItem(store) ?? "[]");
} catch (error) { fail(`Earlier answers cannot be read: ${error.message}`); }
$("speaker").value = lines.at(-1)?.speaker ?? "";
$("speaker").focus();
