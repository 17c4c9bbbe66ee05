panels.examples = root => {
  const $ = part(root), data = dataOf(root), PAGE = 10;
  let shown = PAGE;
  const chosen = () => [+$("first").value, +$("second").value];
  const keeps = {
    won: (a, b) => a && !b, lost: (a, b) => !a && b, both: (a, b) => a && b,
    neither: (a, b) => !a && !b, all: () => true,
  };
  function matching() {
    const [first, second] = chosen(), keep = keeps[$("which").value];
    const words = $("words").value.toLowerCase();
    return data.documents.filter(one =>
      keep(one.right[first], one.right[second]) && (!words || one.text.includes(words)));
  }
  function card(one) {
    const box = document.createElement("article");
    box.className = "example";
    box.setAttribute("aria-label", `${one.task}, document ${one.document}`);
    const question = box.appendChild(document.createElement("p"));
    question.className = "question";
    question.dir = "auto";
    question.textContent = one.question;
    const list = box.appendChild(document.createElement("dl"));
    const line = (term, words, kind) => {
      const name = list.appendChild(document.createElement("dt"));
      name.textContent = term;
      const value = list.appendChild(document.createElement("dd"));
      value.dir = "auto";
      value.className = kind;
      value.textContent = words;
    };
    line("right answer", one.target, "");
    for (const index of new Set(chosen()))
      line(data.models[index], `${one.right[index] ? "\u2713" : "\u2717"} ${one.answers[index]}`,
        one.right[index] ? "right" : "wrong");
    return box;
  }
  function draw() {
    const found = matching();
    $("count").textContent = `${found.length} of ${data.documents.length} documents`;
    $("list").replaceChildren(...found.slice(0, shown).map(card));
    $("more").hidden = found.length <= shown;
  }
  for (const one of data.documents)
    one.text = [one.question, one.target, ...one.answers].join(" ").toLowerCase();
  for (const role of ["first", "second"])
    data.models.forEach((name, i) => $(role).add(new Option(name, i)));
  $("second").value = Math.min(1, data.models.length - 1);
  for (const role of ["first", "second", "which", "words"])
    $(role).addEventListener("input", () => { shown = PAGE; draw(); });
  $("more").addEventListener("click", () => { shown += PAGE; draw(); });
  draw();
};
