// Answers and explains pictures with the exported graph, in this browser. The numbers are those of `opal-deploy infer`.
import * as ort from "./ort/ort.wasm.bundle.min.js";

const byId = (id) => document.getElementById(id);
const model = await (await fetch("model.json")).json();
const { class_names: labels, prototypes_per_class: m, grid: [rows, cols], input_size: [height, width] } = model.metadata;
const numChannels = labels.length * m;
const dropped = new Set(model.metadata.head.dropped ?? []);
const epsilon = model.metadata.head.epsilon;
let session, current = null, working = Promise.resolve();

// ---- a picture as the model takes it ------------------------------------------------------------------------------

/** Pillow's weights for one side, as integers of 22 bits: [first pixel, weights] for each of `out` pixels. */
function bilinearWeights(size, out) {
  const scale = size / out, filterScale = Math.max(scale, 1), support = filterScale;
  return Array.from({ length: out }, (_, i) => {
    const center = (i + 0.5) * scale;
    const first = Math.max(Math.trunc(center - support + 0.5), 0);
    const last = Math.min(Math.trunc(center + support + 0.5), size);
    const weights = Array.from({ length: last - first }, (_, x) => {
      const distance = Math.abs((x + first - center + 0.5) * (1 / filterScale));
      return distance < 1 ? 1 - distance : 0;
    });
    const sum = weights.reduce((total, weight) => total + weight, 0);
    return [first, Int32Array.from(weights, (weight) => Math.trunc(0.5 + (sum ? weight / sum : 0) * (1 << 22)))];
  });
}

/** Resize the rows, or the columns, of RGB pixels of w x h to a length of `out`. */
function resizeSide(pixels, w, h, out, isRow) {
  const [newW, newH] = isRow ? [out, h] : [w, out], step = isRow ? 3 : w * 3, half = 1 << 21;
  const resized = new Uint8Array(newW * newH * 3);
  bilinearWeights(isRow ? w : h, out).forEach(([first, weights], i) => {
    for (let other = 0; other < (isRow ? h : w); other++) {
      const start = isRow ? (other * w + first) * 3 : (first * w + other) * 3;
      const to = isRow ? (other * out + i) * 3 : (i * w + other) * 3;
      for (let channel = 0; channel < 3; channel++) {
        let sum = half, from = start + channel;
        for (const weight of weights) { sum += pixels[from] * weight; from += step; }
        resized[to + channel] = sum >> 22;
      }
    }
  });
  return resized;
}

/** Antialiased bilinear with the arithmetic of Pillow 13: RGB pixels of w x h to outW x outH. A canvas' differs. */
export function resize(pixels, w, h, outW, outH) {
  const rows = (from, height) => w === outW ? from : resizeSide(from, w, height, outW, true);
  const columns = (from, width) => h === outH ? from : resizeSide(from, width, h, outH, false);
  // Pillow's order, which changes what is rounded
  const columnsFirst = h > outH && h - outH > (w - outW) * 2;
  return columnsFirst ? rows(columns(pixels, w), outH) : columns(rows(pixels, h), outW);
}

/** Decode a file: upright, colour profiles not applied, transparency over white, as `infer` does. */
async function decode(blob) {
  const bitmap = await createImageBitmap(blob, {
    imageOrientation: "from-image", colorSpaceConversion: "none", premultiplyAlpha: "none",
  });
  const canvas = byId("picture");
  [canvas.width, canvas.height] = [bitmap.width, bitmap.height];
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0);
  bitmap.close();
  return context;
}

function toInput({ data, width: w, height: h }) {
  const pixels = new Uint8Array(w * h * 3);
  for (let i = 0, j = 0; i < pixels.length; i += 3, j += 4) {
    pixels[i] = data[j];
    pixels[i + 1] = data[j + 1];
    pixels[i + 2] = data[j + 2];
  }
  return resize(pixels, w, h, width, height);
}

// ---- the forward pass ---------------------------------------------------------------------------------------------

async function run(pixels) {
  const images = new ort.Tensor("uint8", pixels, [1, height, width, 3]);
  const outputs = await session.run({ images }, ["logits", "argmax", "scores"]);
  return { logits: outputs.logits.data, cells: outputs.argmax.data, scores: outputs.scores.data };
}

const ofClass = (classId) => Array.from({ length: m }, (_, slot) => classId * m + slot);

/** Every class's cosine without the slots that are off (and those dropped for good), and the norm of the scores. */
function computeCosines(scores, off) {
  const gone = (channel) => off.has(channel) || dropped.has(channel);
  let squares = 0;
  scores.forEach((score, channel) => { if (!gone(channel)) squares += score * score; });
  const norm = Math.sqrt(squares) + epsilon;
  const cosines = labels.map((_, classId) => {
    const left = ofClass(classId).filter((channel) => !gone(channel));
    return left.reduce((sum, channel) => sum + scores[channel] / norm, 0) / Math.sqrt(left.length);
  });
  return { cosines, norm };
}

/** The classes, best first; of equal values the lowest class first. */
const rank = (values) => Array.from(values, (_, i) => i).sort((a, b) => values[b] - values[a] || a - b);

function softmax(logits, temperature) {
  const highest = Math.max(...logits);
  const powers = Array.from(logits, (logit) => Math.exp((logit - highest) / temperature));
  const sum = powers.reduce((total, power) => total + power, 0);
  return powers.map((power) => power / sum);
}

/** The slots of a class that are left without those that are off. */
function findSlots(classId, { scores, cells }, norm, off, imageWidth, imageHeight) {
  const left = ofClass(classId).filter((channel) => !dropped.has(channel) && !off.has(channel));
  return left.map((channel) => {
    const row = Math.floor(cells[channel] / cols), col = cells[channel] % cols;
    const w = imageWidth / cols, h = imageHeight / rows;
    return {
      slot: channel - classId * m, channel, cell: [row, col], score: scores[channel],
      contribution: scores[channel] / norm / Math.sqrt(left.length),
      box: [col * w, row * h, (col + 1) * w, (row + 1) * h],
    };
  });
}

/** The record, in the form of `infer`. */
function buildRecord(picture, outputs) {
  const { cosines, norm } = computeCosines(outputs.scores, new Set());
  const order = rank(outputs.logits), { temperature } = model;
  const probabilities = temperature ? softmax(outputs.logits, temperature) : null;
  const answer = (classId) => ({
    class_id: classId, label: labels[classId], logit: outputs.logits[classId], cosine: cosines[classId],
    ...(probabilities && { calibrated_probability: probabilities[classId] }),
  });
  return {
    schema: 1, image: picture.name, status: "ok", image_sha256: picture.sha256, model_sha256: model.model_sha256,
    width: picture.width, height: picture.height, prediction: answer(order[0]),
    margin: order.length > 1 ? cosines[order[0]] - cosines[order[1]] : null, top: order.slice(0, 5).map(answer),
    evidence: findSlots(order[0], outputs, norm, new Set(), picture.width, picture.height),
  };
}

// ---- what the model promises, checked here ------------------------------------------------------------------------

const fromBase64 = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

async function unpack({ zlib }, Type) {
  const stream = new Blob([fromBase64(zlib)]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Type(await new Response(stream).arrayBuffer());
}

async function digest(bytes) {
  if (!crypto.subtle) return null; // browsers have it on https and on this machine only
  const hash = await crypto.subtle.digest("SHA-256", bytes);
  return Array.from(new Uint8Array(hash), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Run the test vectors; throws where an output is not PyTorch's. */
async function verify() {
  const { vectors, gate } = model;
  const [logits, cells, scores, margins] = await Promise.all([
    unpack(vectors.logits, Float32Array), unpack(vectors.argmax, Int32Array), unpack(vectors.scores, Float32Array),
    unpack(vectors.top2_margin, Float32Array),
  ]);
  let compared = 0, equal = 0, furthest = 0;
  for (const [index, png] of vectors.images.entries()) {
    const context = await decode(new Blob([fromBase64(png)], { type: "image/png" }));
    const outputs = await run(toInput(context.getImageData(0, 0, width, height)));
    outputs.logits.forEach((logit, i) => {
      const expected = logits[index * labels.length + i];
      furthest = Math.max(furthest, Math.abs(logit - expected) / Math.max(1, Math.abs(expected)));
    });
    outputs.cells.forEach((cell, channel) => {
      const place = index * numChannels + channel;
      if (Math.abs(outputs.scores[channel] - scores[place]) > gate.score) throw new Error("a score is not PyTorch's");
      if (margins[place] < gate.tie) return;
      compared += 1;
      equal += cell === cells[place];
    });
  }
  const text = `${equal.toLocaleString("en")} of ${compared.toLocaleString("en")} cells as in PyTorch`;
  // written so that NaN fails, too
  if (equal !== compared || !(furthest <= gate.logit)) throw new Error(`${text}; logits differ by ${furthest}`);
  return text;
}

async function start() {
  const bytes = await (await fetch("model.onnx")).arrayBuffer();
  const found = await digest(bytes);
  if (found && found !== model.model_sha256) throw new Error("model.onnx is damaged: copy it to the server again");
  ort.env.wasm.wasmPaths = { wasm: new URL("ort/ort-wasm-simd-threaded.wasm", import.meta.url).href };
  ort.env.wasm.numThreads = crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency || 1) : 1;
  session = await ort.InferenceSession.create(new Uint8Array(bytes), { executionProviders: ["wasm"] });
  const threads = ort.env.wasm.numThreads;
  byId("checked").textContent =
    `${await verify()}, on this device (WebAssembly, ${threads} ${threads === 1 ? "thread" : "threads"}).`;
}

// ---- the page -----------------------------------------------------------------------------------------------------

const colors = model.colors, svgName = "http://www.w3.org/2000/svg";
const format = (value) => value.toFixed(3);

function say(text, isError = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("alert", isError);
}

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function drawBoxes(slots) {
  const svg = byId("boxes"), { width: w, height: h } = current.picture;
  svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
  const shared = new Map();
  svg.replaceChildren(...slots.flatMap((slot) => {
    const [x0, y0, x1, y1] = slot.box;
    // slots of one cell are drawn inside each other
    const before = shared.get(String(slot.cell)) ?? 0, share = 0.75 ** before;
    shared.set(String(slot.cell), before + 1);
    const boxWidth = (x1 - x0) * share, boxHeight = (y1 - y0) * share;
    return ["case", "box"].map((name) => {
      const rectangle = document.createElementNS(svgName, "rect");
      const place = {
        x: (x0 + x1 - boxWidth) / 2, y: (y0 + y1 - boxHeight) / 2, width: boxWidth, height: boxHeight, class: name,
      };
      for (const [key, value] of Object.entries(place)) rectangle.setAttribute(key, value);
      if (name === "box") rectangle.style.stroke = colors[slot.slot % colors.length];
      rectangle.dataset.channel = slot.channel;
      return rectangle;
    });
  }));
}

function highlight(channel) {
  for (const marked of document.querySelectorAll("[data-channel]"))
    marked.classList.toggle("faded", channel !== null && marked.dataset.channel !== String(channel));
}

/** `findSlots` for the picture that is shown. */
function slotsOf(classId, off, norm) {
  const { outputs, picture } = current;
  return findSlots(classId, outputs, norm, off, picture.width, picture.height);
}

/** Return a class with a bar and a switch for each slot; the bars of those left add up to the cosine. */
function buildClass(classId, cosine, norm, left, longest) {
  const { off } = current;
  const parts = new Map(left.map((slot) => [slot.channel, slot.contribution]));
  const list = slotsOf(classId, new Set(), norm).map((slot) => {
    const isOff = off.has(slot.channel), part = parts.get(slot.channel) ?? 0;
    const box = element("input", { type: "checkbox", checked: !isOff, disabled: !isOff && left.length === 1 });
    box.addEventListener("change", () => {
      off[box.checked ? "delete" : "add"](slot.channel);
      showAnswer();
      document.querySelector(`[data-switch="${slot.channel}"]`)?.focus();
    });
    box.dataset.switch = slot.channel;
    const bar = element("span", { className: "bar" });
    const filled = element("span", { className: "filled" });
    filled.style.width = `${100 * Math.max(0, part) / longest}%`;
    filled.style.background = colors[slot.slot % colors.length];
    bar.append(filled);
    const [row, col] = slot.cell;
    const text = `slot ${slot.slot}`;
    box.ariaLabel = `${labels[classId]}, ${text}: cell in row ${row + 1} of ${rows}, column ${col + 1} of ${cols}, ` +
      `contributes ${format(part)}`;
    const item = element("li", {}, element("label", {}, box, element("span", {}, text)), bar,
      element("span", { className: "number" }, format(part)));
    item.dataset.channel = slot.channel;
    item.addEventListener("pointerenter", () => highlight(slot.channel));
    item.addEventListener("pointerleave", () => highlight(null));
    item.addEventListener("focusin", () => highlight(slot.channel));
    item.addEventListener("focusout", () => highlight(null));
    return item;
  });
  return element("section", { className: "class" },
    element("h3", {}, labels[classId]), element("p", { className: "soft" }, `cosine ${format(cosine)}`),
    element("ul", {}, ...list));
}

const quote = (text) => /^[\w./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\"'\"'")}'`;

function showAnswer() {
  const { outputs, off, record } = current;
  const { cosines, norm } = computeCosines(outputs.scores, off);
  // without a switch the order is that of the logits, to their last bit
  const order = off.size ? rank(cosines) : rank(outputs.logits);
  const [first, second] = order;
  byId("label").textContent = labels[first];
  const facts = [`cosine ${format(cosines[first])}`];
  if (second !== undefined) facts.push(`${format(cosines[first] - cosines[second])} ahead of ${labels[second]}`);
  if (!off.size && record.prediction.calibrated_probability !== undefined)
    facts.push(`probability ${format(record.prediction.calibrated_probability)}, calibrated`);
  byId("facts").textContent = facts.join("; ");
  const was = record.prediction.class_id;
  byId("change").textContent = !off.size ? "" : first === was
    ? `The answer stays without ${off.size === 1 ? "this slot" : "these slots"}.`
    : `With all slots the answer was ${labels[was]}.`;
  // classes with a switched slot stay, so that it can be switched on again
  const touched = [...off].map((channel) => Math.floor(channel / m));
  const classes = [...new Set([first, second, was, ...touched])].filter((classId) => classId !== undefined);
  const left = classes.map((classId) => slotsOf(classId, off, norm));
  const longest = Math.max(...left.flat().map((slot) => slot.contribution), 1e-9);
  drawBoxes(left[0]); // of the answer
  byId("classes").replaceChildren(
    ...classes.map((classId, i) => buildClass(classId, cosines[classId], norm, left[i], longest)));
  const drops = [...off].map((channel) => `--drop ${quote(`${labels[Math.floor(channel / m)]}/${channel % m}`)}`);
  byId("permanent").hidden = !off.size;
  byId("command").textContent = `opal-deploy edit ${quote(model.source)} ${drops.join(" ")}`;
  byId("record").textContent = JSON.stringify(record, null, 2);
  byId("answer").hidden = false;
}

/** Answer for what is on the canvas now. */
async function answer(picture) {
  const { width: w, height: h } = picture;
  const pixels = toInput(byId("picture").getContext("2d").getImageData(0, 0, w, h));
  const outputs = await run(pixels);
  current = { picture, outputs, off: new Set(), record: buildRecord(picture, outputs) };
  showAnswer();
}

function explain(blob) {
  // one after the other, so that an answer belongs to its picture
  working = working.then(async () => {
    say("Looking …");
    let context;
    const sha256 = await digest(await blob.arrayBuffer());
    try {
      context = await decode(blob);
    } catch {
      const name = blob.name ?? "This";
      say(`${name}: not a picture that this browser can open; try JPEG, PNG, WebP or AVIF.`, true);
      return;
    }
    const { width: w, height: h } = context.canvas;
    const began = performance.now();
    try {
      await answer({ name: blob.name ?? null, sha256, width: w, height: h, blob });
      byId("uncover").hidden = true;
      say(`Answered in ${((performance.now() - began) / 1000).toFixed(1)} s; nothing was uploaded.`);
    } catch (error) {
      say(`No answer: ${error.message}`, true);
    }
  });
  return working;
}

// ---- covering a part of the picture -------------------------------------------------------------------------------

let painting = false;
const canvas = byId("picture");

function cover(event) {
  const frame = canvas.getBoundingClientRect();
  const x = (event.clientX - frame.left) * canvas.width / frame.width;
  const y = (event.clientY - frame.top) * canvas.height / frame.height;
  const context = canvas.getContext("2d");
  context.fillStyle = "rgb(127, 127, 127)";
  context.beginPath();
  context.arc(x, y, Math.max(canvas.width, canvas.height) / 16, 0, 2 * Math.PI);
  context.fill();
}

canvas.addEventListener("pointerdown", (event) => {
  if (!byId("brush").checked || !current) return;
  painting = true;
  canvas.setPointerCapture(event.pointerId);
  cover(event);
});
canvas.addEventListener("pointermove", (event) => { if (painting) cover(event); });
canvas.addEventListener("pointerup", () => {
  if (!painting) return;
  painting = false;
  const before = current.uncovered ?? current.record.prediction;
  working = working.then(async () => {
    await answer(current.picture);
    current.uncovered = before;
    const { label, cosine } = current.record.prediction;
    byId("uncover").hidden = false;
    say(`Covered: ${label}, cosine ${format(cosine)}; before: ${before.label}, ${format(before.cosine)}.`);
  });
});
byId("brush").addEventListener("change", () => canvas.classList.toggle("brush", byId("brush").checked));
byId("uncover").addEventListener("click", () => explain(current.picture.blob));

for (const button of document.querySelectorAll("#examples button")) {
  button.addEventListener("click", async () => {
    const source = button.querySelector("img").getAttribute("src");
    const blob = await (await fetch(source)).blob();
    explain(new File([blob], source.split("/").pop()));
  });
}
const file = byId("file");
file.addEventListener("change", () => { if (file.files.length) explain(file.files[0]); });
document.addEventListener("paste", (event) => {
  const [image] = event.clipboardData.files;
  if (image) explain(image);
});
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    byId("drop").classList.toggle("over", name === "dragover");
    if (name === "drop" && event.dataTransfer.files.length) explain(event.dataTransfer.files[0]);
  });
}

try {
  await start();
  document.documentElement.dataset.ready = "yes";
  for (const control of document.querySelectorAll("#file, #examples button")) control.disabled = false;
  say("");
} catch (error) {
  say(`This page answers nothing, because the model does not run here as it was verified: ${error.message}`, true);
}
