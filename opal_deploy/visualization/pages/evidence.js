"use strict";
// Shows an answer's record on every page: its headline and sentences, boxes on the picture, bars, and the table of
// slots; and takes pictures on the pages that answer. Texts become text nodes only: nothing here parses markup.
const evidence = (() => {
  const NUMERIC = { class: "n" };

  function el(tag, attributes, ...children) {
    const svg = ["svg", "g", "rect", "text", "path", "image"].includes(tag);
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
    // the glossary's contributions are to a cosine
    const meaning = text.endsWith("logit") ? null : GLOSSARY[text.split(" ")[0]];
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
    if (!slots.length || slots.some(({ contribution }) => contribution === null || contribution < 0)) return null;
    let start = 0;
    return bar("sum", slots.map(({ slot, contribution }) => {
      start += 100 * contribution;
      return [start - 100 * contribution, 100 * contribution, slot];
    }));
  }

  function table(name, head, body, note = "") {
    const cells = head.map(([text, attributes]) => el("th", { scope: "col", ...attributes }, explained(text)));
    const caption = note ? el("caption", null, note) : null;
    return el("table", { class: name }, caption, el("thead", null, el("tr", null, ...cells)), el("tbody", null, ...body));
  }

  const COSINE = "contribution to the cosine", DISTANCE = "share of the distance (smaller is closer)", SCORE = "score";
  const LOGIT = "contribution to the logit";

  /** What the bars of a record's evidence show, as build_bars of overlay.py finds it. */
  function findMeaning({ evidence: slots, prediction, meaning, rest }) {
    if (meaning) return meaning;
    if (rest !== undefined && rest !== null) return LOGIT;
    if (slots.some((slot) => slot.contribution === null)) return SCORE;
    const sum = slots.reduce((total, slot) => total + slot.contribution, 0);
    return prediction.cosine !== null && Math.abs(sum - prediction.cosine) <= 1e-9 ? COSINE : DISTANCE;
  }

  // ---- the record in words, as sentences.py

  const percent = (share) => `${(100 * share).toFixed(0)}%`;
  const join = (parts) => [...(parts.length > 1 ? [parts.slice(0, -1).join(", ")] : []), parts.at(-1)].join(" and ");
  const sum = (slots) => slots.reduce((total, slot) => total + slot.contribution, 0);

  /** A record's slots, strongest first, if their contributions add up to the cosine. */
  function rankSlots(record) {
    if (!record.evidence?.length || findMeaning(record) !== COSINE || !(sum(record.evidence) > 0)) return [];
    return [...record.evidence].sort((a, b) => b.contribution - a.contribution || a.slot - b.slot);
  }

  /** Nodes of the largest words: the class; of a refused answer that, with the class below. */
  function headline({ status, prediction }) {
    const refused = { unknown: "Unknown", abstained: "Not sure" }[status];
    return refused ? [refused, el("small", null, "closest class: ", bdi(prediction.label))] : [bdi(prediction.label)];
  }

  function place({ box: [x0, y0, x1, y1] }, width, height) {
    const third = (middle, side) => Math.min(2, Math.trunc(3 * middle / 2 / side));
    const row = third(y0 + y1, height), column = third(x0 + x1, width);
    return row === 1 && column === 1 ? "centre" : `${["upper", "middle", "lower"][row]} ${["left", "centre", "right"][column]}`;
  }

  /** Sentences on where the answer comes from, and on how safe it is. */
  function describe(record) {
    const ranked = rankSlots(record), total = sum(ranked), { margin, top, width, height } = record, sentences = [], named = [];
    let reached = 0;
    for (const slot of ranked.slice(0, WORDS.named)) {
      if (reached >= WORDS.mostly * total) break;
      const source = `slot ${slot.slot}${slot.name ? `, ${slot.name}` : ""} (${place(slot, width, height)})`;
      named.push(`${percent(slot.contribution / total)} ${named.length ? "" : "of the match comes "}from ${source}`);
      reached += slot.contribution;
    }
    if (named.length) sentences.push(`${join(named)}.`);
    const shared = record.rest !== undefined && record.rest !== null;
    if (shared) {
      const values = [sum(record.evidence), record.prediction.logit, record.rest, record.bias].map(number);
      sentences.push(`The parts listed add ${values[0]} to the logit ${values[1]}, everything else ${values[2]}, the class's bias ${values[3]}.`);
    }
    const { labels } = record, more = (labels?.length ?? 0) - WORDS.named;
    if (labels) {
      const listed = [...labels.slice(0, WORDS.named).map(({ label }) => label), ...(more > 0 ? [`${more} more`] : [])];
      sentences.push(labels.length > 1 ? `One of ${labels.length} labels: ${join(listed)}.`
        : labels.length ? "The only label." : "No label is likelier than not.");
    }
    if (margin !== null && top.length > 1) {
      const start = margin < WORDS.close && !shared ? "Close call: the" : "The", runnerUp = top[1].label;
      let text = `${start} runner-up, ${runnerUp}, is ${number(Math.abs(margin))} ${margin >= 0 ? "behind" : "ahead"}`;
      if (ranked.length > 1) {
        const answer = margin > ranked[0].contribution ? "the same" : runnerUp;
        text += `; without what slot ${ranked[0].slot} found, the answer would be ${answer}`;
      }
      sentences.push(`${text}.`);
    }
    return sentences;
  }

  /** How a slot's box is drawn: faint, plain or strongest. */
  function emphasize(slots, record) {
    const ranked = record && rankSlots(record), limit = ranked?.length
      ? sum(ranked) * Math.min(WORDS.weak, WORDS.weakPart / ranked.length) : -Infinity;
    return slots.map((slot) => slot.contribution < limit ? "faint"
      : ranked?.length > 1 && slot.channel === ranked[0].channel && slot.slot === ranked[0].slot ? "strongest" : "plain");
  }

  /** How boxes differ, as describe_boxes of overlay.py says it. */
  function boxNote(record) {
    const slots = record.evidence, weak = slots.filter((_, i) => emphasize(slots, record)[i] === "faint");
    if (rankSlots(record).length < 2) return "";
    const numbers = join(weak.map((slot) => String(slot.slot))), share = weak.length && percent(sum(weak) / sum(slots));
    return `Thick: the strongest slot.${!weak.length ? ""
      : weak.length > 1 ? ` Faint: slots ${numbers}, together ${share}.` : ` Faint: slot ${numbers}, ${share}.`}`;
  }

  /** A part [x0, y0, x1, y1] of a picture of width x height, with a box in it. */
  const cut = ({ href, width, height }, [x0, y0, x1, y1], [left, top, right, bottom], slot, text) =>
    el("svg", { class: "patch", viewBox: `${x0} ${y0} ${x1 - x0} ${y1 - y0}`, role: "img", "aria-label": text },
      el("image", { href, width, ...(height ? { height } : {}), preserveAspectRatio: height ? "none" : "xMinYMin" }),
      el("g", { class: `box ${slotClass(slot)}` }, ...["case", "light", "line"].map((name) =>
        el("rect", { class: name, x: left, y: top, width: right - left, height: bottom - top }))));

  /**
   * What a slot found in a picture, and two patches of training images that look like it to the model. `look` has the
   * picture's href, width, height and name, how far patches reach in cells, and the class's patches, as `Patches.to_page`.
   */
  function showPatches({ slot, box: [x0, y0, x1, y1], box }, { href, width, height, isHigh, name, reach, patches }, noun) {
    const across = reach * (x1 - x0), down = reach * (y1 - y0), file = (name ?? "").split(/[\/\\]/).at(-1);
    const around = [Math.max(x0 - across, 0), Math.max(y0 - down, 0), Math.min(x1 + across, width), Math.min(y1 + down, height)];
    const alike = (patches?.[slot] ?? []).filter(([image]) => image !== file).slice(0, 2).map(([image, [a, b, c, d], jpeg]) => {
      const frame = el("svg", { viewBox: "0 0 1 1", preserveAspectRatio: "none", "aria-hidden": "true" }, el("g", { class: `box ${slotClass(slot)}` },
        ...["case", "light", "line"].map((look) => el("rect", { class: look, x: a, y: b, width: c - a, height: d - b }))));
      return el("span", { class: "patch", title: image }, el("img", { src: `data:image/jpeg;base64,${jpeg}`,
        alt: `slot ${slot} in ${image}, a training image` }), el("span", { class: "boxes" }, frame));
    });
    return el("div", { class: "patches" }, cut({ href, width, height: isHigh ? null : height }, around, box, slot, `${noun} ${slot}: found here`),
      ...alike);
  }

  /**
   * The table of a record's slots; `decorate(slot, row)` may change a row, `look` shows patches, see `showPatches`. Bars of contributions are full at 1/m, those of
   * scores at 1, or at `least`. `noun` is what a row is.
   */
  function evidenceTable(record, { decorate = null, least = 0, look = null, noun = "slot" } = {}) {
    const slots = record.evidence, meaning = findMeaning(record), scores = meaning !== SCORE;
    const values = slots.map((slot) => scores ? slot.contribution : slot.score);
    const full = { [COSINE]: 1 / slots.length, [DISTANCE]: 0, [SCORE]: 1, [LOGIT]: 0 }[meaning];
    const high = Math.max(full, least, ...values, 1e-9), low = Math.min(0, ...values), scale = 100 / (high - low);
    const rows = slots.map((slot, i) => {
      const start = (Math.min(0, values[i]) - low) * scale, stop = (Math.max(0, values[i]) - low) * scale;
      const row = el("tr", null, el("td", null, tag(slot.slot), ...(slot.name ? [" ", bdi(slot.name)] : [])),
        el("td", { class: "wide" }, bar("bar", [[start, stop - start, slot.slot]]), look && showPatches(slot, look, noun)),
        el("td", NUMERIC, number(values[i])), scores && !look ? el("td", NUMERIC, number(slot.score)) : null,
        look ? null : el("td", NUMERIC, slot.cell.join(", ")));
      decorate?.(slot, row);
      return row;
    });
    const more = [...(scores ? [["score", NUMERIC]] : []), ["cell (row, col)", NUMERIC]];
    const notes = [record.top ? boxNote(record) : "", look ? `Below each bar: ${noun === "slot" ? "what the slot found" : `the ${noun}`}${
      slots.some(({ slot }) => look.patches?.[slot]?.length) ? ", then parts of training images that look like it to the model" : ""}.` : ""];
    return table("slots", [[noun], [meaning, { colspan: 2 }], ...(look ? [] : more)], rows, notes.filter(Boolean).join(" "));
  }

  /** The labels of an image below the strongest one, for models of several, each with the table of its regions. */
  function otherLabels(record, options) {
    const least = Math.max(0, ...record.evidence.map(({ contribution }) => contribution));
    return (record.labels ?? []).slice(1).filter((label) => label.evidence?.length).map((label) => ({
      name: label.label, probability: number(label.probability), values: `logit ${number(label.logit)}, probability ${number(label.probability)}`,
      table: () => evidenceTable(label, { ...options, least }),
    }));
  }

  /** A record in words and figures: two sentences, the contributions side by side, cosine, margin and probability. */
  function summary(record) {
    const { prediction, margin, evidence: slots } = record;
    const figures = [prediction.cosine === null ? ["logit", number(prediction.logit)] : ["cosine", number(prediction.cosine)]];
    if (margin !== null) figures.push(["margin", number(margin)]);
    if (prediction.calibrated_probability !== undefined)
      figures.push(["calibrated probability", number(prediction.calibrated_probability)]);
    if (slots?.length > 1) figures.push(["different cells", `${new Set(slots.map(({ cell }) => String(cell))).size} of ${slots.length}`]);
    return [
      ...describe(record).map((sentence) => el("p", { class: "words" }, sentence)),
      slots?.length && findMeaning(record) === COSINE ? sumBar(slots) : null, measures(figures, prediction.cosine === null),
    ].filter((part) => part !== null);
  }

  function measures(pairs, isLogit) {
    const items = pairs.map(([name, text]) => el("div", null, el("dt", null, isLogit ? name : explained(name)), el("dd", null, text)));
    return el("dl", { class: "measures" }, ...items);
  }

  const overlap = ([a0, b0, a1, b1], [c0, d0, c1, d1]) =>
    Math.max(0, Math.min(a1, c1) - Math.max(a0, c0)) * Math.max(0, Math.min(b1, d1) - Math.max(b0, d0));

  /** A place for a tag of w x h outside its box: touching it if nothing is covered there, else apart from it. */
  function placeTag([x0, y0, x1, y1], w, h, width, height, boxes, tags) {
    let best = null, least = Infinity;
    for (let gap = 0; gap < 7 * h; gap += h) {
      const xs = [x0 - gap, (x0 + x1 - w) / 2, x1 - w + gap], ys = [y0 - h - gap, y1 + gap];
      for (const [x, y] of [...ys.flatMap((y) => xs.map((x) => [x, y])), [x1 + gap, y0], [x0 - w - gap, y0]]) {
        const at = [x, y, x + w, y + h], isOut = x < 0 || y < 0 || x + w > width || y + h > height;
        const covered = (others) => others.reduce((total, other) => total + overlap(at, other), 0);
        const cost = isOut ? Infinity : gap + 6 * covered(boxes) + 200 * covered(tags);
        if (cost < least) [best, least] = [at, cost];
      }
    }
    return best ?? [x0, y0, x0 + w, y0 + h];
  }

  /**
   * Draw the boxes of slots {slot, channel, cell, box} over a picture of width x height: thin, with tags next to them; of a
   * `record` with its strongest and weakest apart. Those of `others`, slots of other classes, are shown while their row is
   * pointed at. With `isDrawn` the picture has its boxes.
   */
  function drawBoxes(layer, slots, width, height, { others = [], record = null, fields = [], isDrawn = false } = {}) {
    const letters = Math.max(width, height) / 38, emphases = emphasize(slots, record), tags = [];
    const cells = Map.groupBy(slots, (slot) => String(slot.cell)), boxes = [...slots, ...others].map(({ box }) => box);
    const place = { preserveAspectRatio: "none", viewBox: `0 0 ${width} ${height}` };
    const around = ([x0, y0, x1, y1]) => `M${x0} ${y0}V${y1}H${x1}V${y0}z`;
    const veil = el("path", { class: "veil", d: `M0 0H${2 * width}V${2 * height}H0z${slots.map(({ box }) => around(box)).join("")}` });
    const frames = fields.flatMap(([left, top, right, bottom, slot]) => ["case", slotClass(slot)].map((look) =>
      el("rect", { class: `field ${look}`, x: left, y: top, width: right - left, height: bottom - top })));
    const groups = (isDrawn ? [] : [...slots, ...others]).map((slot, i) => {
      const isOther = i >= slots.length, [x0, y0, x1, y1] = slot.box, text = String(slot.slot);
      const shared = isOther ? [slot] : cells.get(String(slot.cell)), turn = shared.indexOf(slot);
      const at = placeTag(slot.box, letters * (0.6 * text.length + 0.5), 1.25 * letters, width, height, boxes.slice(0, slots.length), tags);
      if (!isOther) tags.push(at);
      const middle = [(at[0] + at[2]) / 2, (at[1] + at[3]) / 2];
      const start = [Math.min(Math.max(middle[0], x0), x1), Math.min(Math.max(middle[1], y0), y1)];
      const rect = (name) => el("rect", { class: name, x: x0, y: y0, width: x1 - x0, height: y1 - y0 });
      const group = el("g", { class: `box ${isOther ? "other" : emphases[i]} ${slotClass(slot.slot)}` },
        el("path", { class: "case", d: `M${start}L${middle}` }), el("path", { class: "line", d: `M${start}L${middle}` }),
        ...(turn ? [] : [rect("case"), rect("light"), rect("line")]),
        el("rect", { class: "chip", x: at[0], y: at[1], width: at[2] - at[0], height: at[3] - at[1] }),
        el("text", { x: middle[0], y: middle[1], "font-size": letters }, text));
      if (slot.channel !== undefined) link(group, slot.channel);
      return group;
    });
    layer.replaceChildren(el("svg", place, veil, ...frames, ...groups));
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

  document.addEventListener("change", ({ target }) => { if (target.id === "show-boxes") document.body.dataset.boxes = target.value; });

  return { el, bdi, number, table, evidenceTable, otherLabels, summary, headline, drawBoxes, link, say, takePictures, NUMERIC, MEANINGS: [COSINE, DISTANCE, SCORE] };
})();
