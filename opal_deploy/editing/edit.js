"use strict";
// Accuracy without the ticked slots, in closed form: the cosine of class c is the sum of its scores that are left over
// sqrt(their number), divided by the norm of all scores that are left. Logits are rounded to float32, as the network's.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const boxes = [...document.querySelectorAll("input[type=checkbox]")];
  const bytes = Uint8Array.from(atob(data.scores), (character) => character.charCodeAt(0));
  const scores = new Float32Array(bytes.buffer);
  const channels = data.names.length, { m, labels } = data;

  function answers(dropped) {
    const kept = data.names.map((_, channel) => (dropped.has(channel) ? 0 : 1));
    const sums = new Float64Array(channels / m);
    const roots = sums.map((_, c) => Math.sqrt(kept.slice(c * m, c * m + m).reduce((sum, each) => sum + each)));
    return labels.map((_, image) => {
      let squares = 0, best = 0, highest = -Infinity;
      sums.fill(0);
      for (let channel = 0; channel < channels; channel++) {
        const score = kept[channel] * scores[image * channels + channel];
        sums[Math.floor(channel / m)] += score;
        squares += score * score;
      }
      const norm = Math.sqrt(squares) + data.epsilon;
      sums.forEach((sum, c) => {
        const logit = -Math.fround(Math.sqrt(Math.max(2 - (2 * sum) / norm / roots[c], 1e-12)));
        if (logit > highest) [best, highest] = [c, logit];
      });
      return best;
    });
  }

  const isRight = (answer, image) => answer === labels[image];
  const before = scores.length ? answers(new Set(data.dropped)) : [];

  function keepOneSlot(ticked) {
    for (const box of boxes) {
      const first = Math.floor(Number(box.value) / m) * m;
      const left = Array.from({ length: m }, (_, slot) => first + slot).filter((channel) => !ticked.has(channel));
      box.disabled = left.length === 1 && left[0] === Number(box.value);
      box.title = box.disabled ? "its class's last slot" : "";
    }
  }

  function update() {
    const ticked = boxes.filter((box) => box.checked).map((box) => Number(box.value));
    const quote = (name) => /^[\w./-]+$/.test(name) ? name : `'${name.replaceAll("'", "'\"'\"'")}'`;
    const drops = ticked.map((channel) => `--drop ${quote(data.names[channel])}`);
    document.getElementById("command").textContent = ticked.length
      ? [data.command, ...drops, data.rest].join(" ") : "Tick slots to see the accuracy without them.";
    const dropped = new Set([...data.dropped, ...ticked]);
    keepOneSlot(dropped);
    if (!scores.length) return;
    const after = answers(dropped);
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
