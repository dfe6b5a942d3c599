"use strict";
// Accuracy without the ticked slots, in closed form. The cosine of class c is the sum of its scores that are left over
// sqrt(their number), divided by a norm that all classes share, so that the norm changes no answer.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const boxes = [...document.querySelectorAll("input[type=checkbox]")];
  const bytes = Uint8Array.from(atob(data.scores), (character) => character.charCodeAt(0));
  const scores = new Float32Array(bytes.buffer);
  const channels = data.names.length, { m, labels } = data;

  function answers(dropped) {
    return labels.map((_, image) => {
      let best = 0, highest = -Infinity;
      for (let first = 0; first < channels; first += m) {
        let sum = 0, count = 0;
        for (let channel = first; channel < first + m; channel++) {
          if (dropped.has(channel)) continue;
          sum += scores[image * channels + channel];
          count += 1;
        }
        const cosine = sum / Math.sqrt(count);
        if (cosine > highest) [best, highest] = [first / m, cosine];
      }
      return best;
    });
  }

  const isRight = (answer, image) => answer === labels[image];
  const before = scores.length ? answers(new Set(data.dropped)) : [];

  function keepOneSlot(changed) {
    const of = (box) => Math.floor(Number(box.value) / m);
    const own = Array.from({ length: m }, (_, slot) => of(changed) * m + slot);
    const ticked = new Set(boxes.filter((box) => box.checked).map((box) => Number(box.value)));
    if (own.every((channel) => ticked.has(channel) || data.dropped.includes(channel))) changed.checked = false;
  }

  function update() {
    const ticked = boxes.filter((box) => box.checked).map((box) => Number(box.value));
    const quote = (name) => /^[\w./-]+$/.test(name) ? name : `'${name.replaceAll("'", "'\"'\"'")}'`;
    const drops = ticked.map((channel) => `--drop ${quote(data.names[channel])}`);
    document.getElementById("command").textContent = ticked.length
      ? [data.command, ...drops, data.rest].join(" ") : "Tick slots to see the accuracy without them.";
    if (!scores.length) return;
    const after = answers(new Set([...data.dropped, ...ticked]));
    const share = (list) => 100 * list.filter(isRight).length / labels.length;
    const gained = after.filter((answer, i) => isRight(answer, i) && !isRight(before[i], i)).length;
    const lost = after.filter((answer, i) => !isRight(answer, i) && isRight(before[i], i)).length;
    document.getElementById("accuracy").textContent = `${share(after).toFixed(1)} % right`;
    const change = document.getElementById("change");
    change.textContent = ticked.length
      ? `${share(before).toFixed(1)} % with all; ${gained} become right, ${lost} become wrong` : "with all slots";
    change.className = gained > lost ? "gain" : lost > gained ? "loss" : "";
  }

  for (const box of boxes) {
    box.addEventListener("change", () => { keepOneSlot(box); update(); });
  }
  update();
})();
