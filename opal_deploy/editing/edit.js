"use strict";
// Accuracy without the ticked slots, in closed form. Logits are rounded to float32, as the network's.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const boxes = [...document.querySelectorAll("input[type=checkbox]")];
  const bytes = Uint8Array.from(atob(data.scores), (character) => character.charCodeAt(0));
  const scores = new Float32Array(bytes.buffer);
  const { class_map: classMap, labels } = data, { owners } = readClassMap(classMap);
  const classes = boxes.map((box) => owners(Number(box.value))[0][0]);

  function answers(ticked) {
    const map = readClassMap(classMap, ticked);
    return labels.map((_, image) => {
      const from = image * map.size, cosines = map.totals(scores, map.norm(scores, data.epsilon, from), from);
      const logits = cosines.map((cosine) => -Math.fround(Math.sqrt(Math.max(2 - 2 * cosine, 1e-12))));
      return logits.indexOf(Math.max(...logits));
    });
  }

  const isRight = (answer, image) => answer === labels[image];
  const before = scores.length ? answers(new Set()) : [];

  function keepOneSlot(ticked) {
    const map = readClassMap(classMap, ticked);
    for (const [i, box] of boxes.entries()) {
      const left = map.slots(classes[i]);
      box.disabled = left.length === 1 && left[0].channel === Number(box.value);
      box.title = box.disabled ? "its class's last slot" : "";
    }
  }

  function update() {
    const ticked = boxes.filter((box) => box.checked).map((box) => Number(box.value));
    const quote = (name) => /^[\w./-]+$/.test(name) ? name : `'${name.replaceAll("'", "'\"'\"'")}'`;
    const drops = ticked.map((channel) => `--drop ${quote(data.names[channel])}`);
    document.getElementById("command").textContent = ticked.length
      ? [data.command, ...drops, data.rest].join(" ") : "Tick slots to see the accuracy without them.";
    keepOneSlot(new Set(ticked));
    if (!scores.length) return;
    const after = answers(new Set(ticked));
    const count = (list) => list.filter(isRight).length;
    const percent = (list) => `${(100 * count(list) / labels.length).toFixed(1)} %`;
    const gained = after.filter((answer, i) => isRight(answer, i) && !isRight(before[i], i)).length;
    const lost = after.filter((answer, i) => !isRight(answer, i) && isRight(before[i], i)).length;
    document.getElementById("accuracy").textContent = `Accuracy ${percent(after)}`;
    const change = document.getElementById("change");
    change.textContent = `(${count(after)} of ${labels.length})` + (ticked.length
      ? `; ${percent(before)} with all slots; ${gained} become right, ${lost} become wrong` : " with all slots");
    change.className = gained > lost ? "gain" : lost > gained ? "loss" : "";
  }

  for (const box of boxes) box.addEventListener("change", update);
  update();
})();
