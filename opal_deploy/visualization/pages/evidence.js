"use strict";
// Draws the evidence of an answer on every page: boxes on the picture, bars, and the table of slots; and takes pictures on
// the pages that answer. Texts become text nodes only: nothing here parses markup.
const evidence = (() => {
  const NUMERIC = { class: "n" };

  function el(tag, attributes, ...children) {
    const svg = ["svg", "rect"].includes(tag);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, value);
    node.append(...children.filter((child) => child !== null));
    return node;
  }

  // long names break after folders and words
  const bdi = (text) => el("bdi", null, ...text.split(/(?<=[/_])/).flatMap((part, i) => i ? [el("wbr"), part] : [part]));
  const number = (value) => value === null ? "–" : value.toFixed(3).replace(/^-0\.000$/, "0.000");
  const slotClass = (slot) => `slot-${slot % SLOT_COLORS}`;
  const tag = (slot) => el("span", { class: `tag ${slotClass(slot)}` }, String(slot));

  /** A text with the glossary's sentences about its first word as a tooltip. */
  function explained(text) {
    const meaning = GLOSSARY[text.split(" ")[0]];
    return meaning ? el("abbr", { title: meaning }, text) : text;
  }

  /** A bar of parts [start, width, slot], where 100 is the full bar. */
  function bar(name, parts) {
    const rects = parts.map(([x, width, slot]) =>
      el("rect", { x, width: Math.max(0, width), height: 6, class: `filled ${slotClass(slot)}` }));
    const track = el("rect", { class: "track", width: 100, height: 6 });
    return el("svg", { class: name, viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" }, track, ...rects);
  }

  /** The contributions side by side, which add up to the cosine; null where they do not. */
  function sumBar(slots) {
    if (!slots.length || slots.some(({ value }) => value === null || value < 0)) return null;
    let start = 0;
    return bar("sum", slots.map(({ slot, value }) => {
      start += 100 * value;
      return [start - 100 * value, 100 * value, slot];
    }));
  }

  function table(name, head, body) {
    const cells = head.map(([text, attributes]) => el("th", { scope: "col", ...attributes }, explained(text)));
    return el("table", { class: name }, el("thead", null, el("tr", null, ...cells)), el("tbody", null, ...body));
  }

  /**
   * The table of slots: {slot, row, column, value, score, start, stop, name}, with the bar's ends in percent.
   * `meaning` says what a value is; without `scores` it is the score itself. `decorate(slot, row)` may change a row.
   */
  function slotTable(slots, meaning, scores, decorate) {
    const body = slots.map((slot) => {
      const row = el("tr", null, el("td", null, tag(slot.slot), ...(slot.name ? [" ", bdi(slot.name)] : [])),
        el("td", { class: "wide" }, bar("bar", [[slot.start, slot.stop - slot.start, slot.slot]])),
        el("td", NUMERIC, number(slot.value)), scores ? el("td", NUMERIC, number(slot.score)) : null,
        el("td", NUMERIC, `${slot.row}, ${slot.column}`));
      decorate?.(slot, row);
      return row;
    });
    const head = [["slot"], [meaning, { colspan: 2 }], ...(scores ? [["score", NUMERIC]] : []), ["cell", NUMERIC]];
    return table("slots", head, body);
  }

  const COSINE = "contribution to the cosine", DISTANCE = "share of the distance (smaller is closer)", SCORE = "score";

  /** What the bars of a record's evidence show, as build_bars of overlay.py finds it. */
  function findMeaning({ evidence: slots, prediction }) {
    if (slots.some((slot) => slot.contribution === null)) return SCORE;
    const sum = slots.reduce((total, slot) => total + slot.contribution, 0);
    return prediction.cosine !== null && Math.abs(sum - prediction.cosine) <= 1e-9 ? COSINE : DISTANCE;
  }

  /** The table of a record's slots. Bars of contributions are full at 1/m, those of scores at 1, or at `least`. */
  function evidenceTable(record, decorate, least = 0) {
    const slots = record.evidence, meaning = findMeaning(record);
    const values = slots.map((slot) => meaning === SCORE ? slot.score : slot.contribution);
    const full = { [COSINE]: 1 / slots.length, [DISTANCE]: 0, [SCORE]: 1 }[meaning];
    const high = Math.max(full, least, ...values, 1e-9), low = Math.min(0, ...values), scale = 100 / (high - low);
    const rows = slots.map((slot, i) => ({
      ...slot, row: slot.cell[0], column: slot.cell[1], value: values[i],
      start: (Math.min(0, values[i]) - low) * scale, stop: (Math.max(0, values[i]) - low) * scale,
    }));
    return slotTable(rows, meaning, meaning !== SCORE, decorate);
  }

  /** A record's figures: the contributions side by side, cosine, margin, probability and the runner-up. */
  function summary({ prediction, margin, top, evidence: slots }) {
    const figures = [prediction.cosine === null ? ["logit", number(prediction.logit)] : ["cosine", number(prediction.cosine)]];
    if (margin !== null) figures.push(["margin", number(margin)]);
    if (prediction.calibrated_probability !== undefined)
      figures.push(["calibrated probability", number(prediction.calibrated_probability)]);
    const isSum = slots?.length && findMeaning({ evidence: slots, prediction }) === COSINE;
    const runner = top.length > 1 ? top[1] : null;
    return [
      isSum ? sumBar(slots.map((slot) => ({ slot: slot.slot, value: slot.contribution }))) : null, measures(figures),
      runner && el("p", { class: "runner" }, "runner-up: ", bdi(runner.label), ` ${number(runner.cosine ?? runner.logit)}`),
    ].filter((part) => part !== null);
  }

  function measures(pairs) {
    const items = pairs.map(([name, text]) => el("div", null, el("dt", null, explained(name)), el("dd", null, text)));
    return el("dl", { class: "measures" }, ...items);
  }

  /**
   * Draw the boxes of slots {slot, channel, cell, box} over a picture of width x height; one cell's inside each other.
   * Those of `others`, slots of other classes, are shown while their row is pointed at.
   */
  function drawBoxes(layer, slots, width, height, others = []) {
    const shared = new Map();
    layer.replaceChildren(...[...slots, ...others].map((slot, i) => {
      const [x0, y0, x1, y1] = slot.box, cell = String(slot.cell), isOther = i >= slots.length;
      const before = isOther ? 0 : shared.get(cell) ?? 0;
      if (!isOther) shared.set(cell, before + 1);
      const name = tag(slot.slot), kind = isOther ? "box other" : "box";
      const box = el("span", { class: `${kind} ${slotClass(slot.slot)}` }, name);
      const inset = `${4 * before}px`, percent = (part, whole) => `calc(${100 * part / whole}% + ${inset})`;
      Object.assign(box.style, {
        left: percent(x0, width), top: percent(y0, height), right: percent(width - x1, width),
        bottom: percent(height - y1, height),
      });
      // tags stand above their box, below it at the upper edge, those of one cell side by side
      name.style[y0 < height / 12 ? "top" : "bottom"] = "100%";
      name.style[x1 > 0.85 * width ? "right" : "left"] = `${before * 1.6}rem`;
      link(box, slot.channel);
      return box;
    }));
  }

  /** Light up the row and the box of a channel and fade other boxes; null shows all again. */
  function highlight(channel) {
    for (const marked of document.querySelectorAll("[data-channel]")) {
      const isIt = marked.dataset.channel === String(channel);
      marked.classList.toggle("lit", isIt);
      marked.classList.toggle("faded", channel !== null && !isIt);
    }
  }

  /** Highlight a slot's row and box while one of them is pointed at or focused, or until a touch elsewhere. */
  function link(node, channel) {
    node.dataset.channel = channel;
    for (const name of ["pointerenter", "focusin"]) node.addEventListener(name, () => highlight(channel));
    node.addEventListener("focusout", () => highlight(null));
    node.addEventListener("pointerleave", (event) => { if (event.pointerType !== "touch") highlight(null); });
  }

  /** Show what the page does, or what went wrong. */
  function say(text, isError = false) {
    const status = document.getElementById("status");
    status.textContent = text;
    status.classList.toggle("alert", isError);
  }

  /** Call `take` with the files that are chosen, pasted or dropped together. */
  function takePictures(take) {
    const file = document.getElementById("file"), drop = document.getElementById("drop");
    file.addEventListener("change", () => { if (file.files.length) take(file.files); });
    document.addEventListener("paste", ({ clipboardData: { files } }) => { if (files.length) take(files); });
    for (const name of ["dragover", "dragleave", "drop"]) {
      document.addEventListener(name, (event) => {
        event.preventDefault();
        drop.classList.toggle("over", name === "dragover");
        if (name === "drop" && event.dataTransfer.files.length) take(event.dataTransfer.files);
      });
    }
  }

  document.addEventListener("pointerdown", (event) => { if (!event.target.closest("[data-channel]")) highlight(null); });

  return { el, bdi, number, sumBar, table, slotTable, evidenceTable, summary, measures, drawBoxes, link, say, takePictures, NUMERIC };
})();
