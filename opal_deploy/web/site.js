// The page: takes pictures, shows answers and their evidence, and lets people try them.
import { createFrame } from "./crop.js";
import {
  buildRecord, classMap, computeTotals, describeClass, findRest, findShares, findSlots, hasRegions, inputForm, isShared, judge, labels, metadata, model, rank, run,
  start,
} from "./model.js";
import { openPicture, readPicture } from "./pictures.js";
import { cover, fit } from "./pixels.js";

const byId = (id) => document.getElementById(id);
const { el, number, say } = evidence;
const canvas = byId("picture");
let current = null;

// ---- one thing at a time, what the visitor asked for last before the rest of the queue --------------------------------

const urgent = [], waiting = [];
let isBusy = false;

async function work() {
  if (isBusy) return;
  isBusy = true;
  for (let task; (task = urgent.shift() ?? waiting.shift());) {
    try {
      await task();
    } catch (error) {
      say(`No answer: ${error.message}`, true);
    }
  }
  isBusy = false;
}

/** Do something after all that was asked for before, so that an answer belongs to its picture. */
function queue(task, isUrgent = true) {
  (isUrgent ? urgent : waiting).push(task);
  work();
}

// ---- an answer ----------------------------------------------------------------------------------------------------

/** `findSlots` for the picture that is shown. */
const slotsOf = (classId, off, norm) => findSlots(classId, current.outputs, norm, off, current.picture);

/** Put a slot's switch into its row. */
function addSwitch(row, slot, classId, isLast) {
  const { off } = current, label = labels[classId], isOff = off.has(slot.channel);
  const box = el("input", { type: "checkbox", "aria-label": `${label}, slot ${slot.slot} counts` });
  Object.assign(box, { checked: !isOff, disabled: isLast && !isOff });
  box.dataset.switch = slot.channel;
  box.addEventListener("change", () => {
    off[box.checked ? "delete" : "add"](slot.channel);
    current.seen.add(classId);
    showAnswer();
    document.querySelector(`[data-switch="${slot.channel}"]`)?.focus();
  });
  row.firstChild.prepend(el("label", null, box), " ");
  evidence.link(row, slot.channel);
}

/**
 * Tint the picture's cells by their shares of a class's logit: red speaks for the class, black against it. As
 * `paint_shares` of visualization/overlay.py; nothing without shares.
 */
function paintShares(classId) {
  const shares = findShares(classId, current.outputs), [rows, cols] = metadata.grid, heat = byId("heat");
  if (!shares) return;
  const most = Math.max(...shares.map(Math.abs), 1e-12), { width, height, crop } = current.picture;
  const [x0, y0, x1, y1] = fit(crop, inputForm()).shown;
  [heat.width, heat.height] = [cols, rows];
  const pixels = Array.from(shares, (share) => [...(share > 0 ? [222, 45, 38] : [40, 40, 40]), 0.55 * 255 * Math.abs(share) / most]);
  heat.getContext("2d").putImageData(new ImageData(Uint8ClampedArray.from(pixels.flat()), cols, rows), 0, 0);
  Object.assign(heat.style, {
    left: `${100 * x0 / width}%`, top: `${100 * y0 / height}%`, width: `${100 * (x1 - x0) / width}%`, height: `${100 * (y1 - y0) / height}%`,
  });
}

/** Return a class with its slots; the contributions of those that are left add up to its total. */
function buildClass(classId, total, norm, left, longest) {
  const parts = new Map(left.map((slot) => [slot.channel, slot.contribution]));
  const slots = slotsOf(classId, new Set(), norm).map((slot) => ({ ...slot, contribution: parts.get(slot.channel) ?? 0 }));
  const prediction = describeClass(classId, total), rest = findRest(classId, total, left);
  const { width, height, name } = current.picture, patches = model.patches[classId];
  const table = evidence.evidenceTable({ evidence: slots, prediction, ...rest, top: classId === current.record.prediction.class_id && [] }, {
    decorate: (slot, row) => hasRegions() ? evidence.link(row, slot.channel) : addSwitch(row, slot, classId, left.length === 1), least: longest,
    look: { href: current.href, width, height, name, reach: model.reach, patches }, ...(hasRegions() && { noun: "region" }),
  });
  const section = el("section", { class: "class" }, el("h3", null, labels[classId]),
    el("p", { class: "soft" }, hasRegions() ? describeSum(classId, total, left, rest) : describeMatch(prediction)), table);
  if (hasRegions()) {
    // its cells are shown while it is pointed at
    section.tabIndex = 0;
    for (const name of ["pointerenter", "focusin"]) section.addEventListener(name, () => paintShares(classId));
    for (const name of ["pointerleave", "focusout"])
      section.addEventListener(name, () => paintShares(current.record.prediction.class_id));
  }
  return section;
}

const describeMatch = ({ cosine, logit }) => cosine === null ? `logit ${number(logit)}` : `cosine ${number(cosine)}`;

/** How a class's regions, everything else and its bias add up to its logit. */
function describeSum(classId, logit, regions, { rest, bias }) {
  const { probability } = current.record.labels?.find((label) => label.class_id === classId) ?? {};
  const parts = [...regions.map(({ contribution }) => number(contribution)), `${number(rest)} elsewhere`, `${number(bias)} bias`];
  return `logit ${number(logit)} = ${parts.join(" + ")}${probability === undefined ? "" : `; probability ${number(probability)}`}`;
}

const quote = (text) => /^[\w./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\"'\"'")}'`;

function showAnswer() {
  const { outputs, off, record, picture } = current;
  const { totals, norm } = computeTotals(outputs, off);
  // without a switch the order is that of the logits, to their last bit
  const order = off.size ? rank(totals) : rank(outputs.logits);
  const [first, second] = order, was = record.prediction.class_id;
  // classes with a switched slot stay, so that it can be switched on again
  const touched = isShared() ? [...current.seen].map((classId) => [classId]) : [...off].flatMap(classMap.owners);
  const several = record.labels?.filter((label) => label.evidence).map((label) => label.class_id) ?? [];
  const classes = [...new Set([first, ...several, second, was, ...touched.map(([classId]) => classId)])].filter((classId) => classId !== undefined);
  const [left, ...others] = classes.map((classId) => slotsOf(classId, off, norm));
  const shown = off.size ? {
    width: picture.width, height: picture.height, status: record.status === "unknown" ? "unknown" : judge({ margin: findMargin(totals, order) })?.status ?? "ok",
    prediction: describeClass(first, totals[first]), ...findRest(first, totals[first], left), margin: findMargin(totals, order),
    top: order.slice(0, 2).map((classId) => describeClass(classId, totals[classId])), evidence: left,
  } : record;
  const unsure = judge({ margin: shown.margin });
  byId("flag").textContent = record.status === "unknown" ? `Unknown: ${record.reason}`
    : unsure ? `Not sure: the margin is below ${number(unsure.limit)}` : "";
  byId("flag").hidden = !byId("flag").textContent;
  byId("label").replaceChildren(...evidence.headline(shown));
  byId("figures").replaceChildren(...evidence.summary(shown));
  byId("change").textContent = !off.size ? "" : first === was
    ? `The answer stays without ${off.size === 1 ? "this slot" : "these slots"}.`
    : `With all slots the answer was ${labels[was]}.`;
  paintShares(first);
  evidence.drawBoxes(byId("boxes"), left, picture.width, picture.height, { others: others.flat(), record: shown });
  byId("heat").hidden = !hasRegions();
  const longest = Math.max(...[left, ...others].flat().map((slot) => slot.contribution));
  byId("classes").replaceChildren(...classes.map((classId, i) =>
    buildClass(classId, totals[classId], norm, [left, ...others][i], longest)));
  const drops = isShared() ? [...off].map((channel) => `--drop ${channel}`)
    : touched.map(([classId, slot]) => `--drop ${quote(`${labels[classId]}/${slot}`)}`);
  byId("permanent").hidden = !off.size;
  byId("command").textContent = `opal-deploy edit ${quote(model.source)} ${drops.join(" ")}`;
  byId("record").textContent = JSON.stringify(record, null, 2);
  byId("answer").hidden = false;
}

/** Answer for the shown picture's input. */
async function answer(picture, input) {
  const outputs = await run(input);
  // as it is shown, with what is covered
  const href = canvas.toDataURL("image/jpeg", 0.85);
  current = { picture, outputs, href, off: new Set(), seen: new Set(), record: buildRecord(picture, outputs) };
  showAnswer();
  return current.record;
}

// ---- pictures, and the list of those that were given --------------------------------------------------------------

const THUMBNAIL_PIXELS = 96 * 96;
const items = [];
let shown = null;

/** Say how many pictures of the list are answered; a single one needs no list. */
function count() {
  const [answered, refused] = ["answered", "refused"].map((state) => items.filter((item) => item.state === state).length);
  byId("counted").textContent = `${answered} of ${items.length} pictures answered${refused ? `, ${refused} refused` : ""}`;
  byId("given").hidden = items.length < 2;
}

/** Note on a picture what became of it. */
function mark(item, state, text) {
  item.state = state;
  item.note.textContent = item.note.title = text;
  item.note.classList.toggle("alert", state === "refused");
  count();
}

function draw(preview, target) {
  [target.width, target.height] = [preview.width, preview.height];
  target.getContext("2d").drawImage(preview, 0, 0);
}

/** A picture, with the button that shows it. */
function makeItem(blob) {
  const name = blob.name ?? "pasted", thumbnail = el("canvas", { width: 96, height: 72, "aria-hidden": "true" });
  const note = el("span", null, "waiting"), button = el("button", { type: "button" }, thumbnail, el("bdi", null, name), note);
  const item = { blob, name, thumbnail, note, button, crop: null, state: "waiting" };
  button.addEventListener("click", () => show(item));
  return item;
}

const describe = ({ prediction, status }) =>
  ({ ok: prediction.label, unknown: `unknown (${prediction.label})`, abstained: `not sure (${prediction.label})` })[status];

/** Answer for a picture of the list without showing it. */
const look = (item) => queue(async () => {
  if (item.state !== "waiting") return;
  try {
    const { preview, input, ...picture } = await openPicture(item.blob, { form: inputForm(), pixels: THUMBNAIL_PIXELS });
    draw(preview, item.thumbnail);
    mark(item, "answered", describe(buildRecord({ name: item.name, ...picture }, await run(input))));
  } catch (error) {
    mark(item, "refused", error.message);
  }
}, false);

/** Show a picture with its answer. */
const show = (item) => queue(async () => {
  say("Looking …");
  const began = performance.now();
  try {
    const { preview, input, ...picture } = await openPicture(item.blob, { form: inputForm(), crop: item.crop, keep: true });
    draw(preview, canvas);
    draw(preview, item.thumbnail);
    const record = await answer({ name: item.blob.name ?? null, marks: [], ...picture }, input);
    mark(item, "answered", describe(record));
  } catch (error) {
    mark(item, "refused", error.message);
    say(`${item.name}: ${error.message}`, true);
    return;
  }
  for (const other of [shown, item]) other?.button.toggleAttribute("aria-current", other === item);
  shown = item;
  byId("uncover").hidden = true;
  placeFrame();
  const ms = performance.now() - began;
  say(`Answered in ${ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`}; nothing was uploaded.`);
});

/** Take pictures into the list: the first is shown, the others are answered after it. */
function take(files) {
  const [first, ...others] = Array.from(files, makeItem);
  items.push(first, ...others);
  byId("queue").append(...[first, ...others].map(({ button }) => el("li", null, button)));
  count();
  show(first);
  others.forEach(look);
}

// ---- the part of the picture that the model sees ---------------------------------------------------------------------

/** Answer for another part of the shown picture, covered parts included, and say what changed. */
async function answerPart(marks, crop, said) {
  const { picture, record, before = record.prediction } = current;
  const input = await readPicture(marks, crop, inputForm());
  await answer({ ...picture, crop }, input);
  const after = current.record.prediction;
  say(`${said}: ${after.label}, ${describeMatch(after)}; before: ${before.label}, ${number(before.cosine ?? before.logit)}.`);
  return before;
}

const frame = createFrame(canvas.parentElement, () => !byId("brush").checked, (crop) => queue(async () => {
  await answerPart([], crop, "This part");
  shown.crop = crop;
}));

function placeFrame() {
  const { width, height, crop } = current.picture;
  frame.set(byId("crop").checked, width, height, crop);
  byId("crop-help").hidden = !byId("crop").checked;
}

byId("crop").addEventListener("change", () => {
  placeFrame();
  if (byId("crop").checked) return;
  const { width, height, crop } = current.picture, whole = [0, 0, width, height];
  shown.crop = null;
  if (String(crop) !== String(whole)) queue(() => answerPart([], whole, "The whole picture"));
});

// ---- covering parts of the picture --------------------------------------------------------------------------------

let stroke = null;

/** Cover parts on the page's canvas, which may be smaller than the picture. */
function paint(marks) {
  const context = canvas.getContext("2d"), { width, height } = current.picture;
  context.setTransform(canvas.width / width, 0, 0, canvas.height / height, 0, 0);
  cover(context, marks);
  context.resetTransform();
}

function brush({ clientX, clientY }) {
  const area = canvas.getBoundingClientRect(), { width, height } = current.picture;
  const x = (clientX - area.left) * width / area.width, y = (clientY - area.top) * height / area.height;
  const circle = { circle: [x, y, Math.max(width, height) / 16] };
  stroke.push(circle);
  paint([circle]);
}

const answerCovered = (marks) => queue(async () => {
  const before = await answerPart(marks, current.picture.crop, "Covered");
  // of the whole picture, however often parts of it are covered
  current.before = before;
  byId("uncover").hidden = false;
});

canvas.addEventListener("pointerdown", (event) => {
  if (!byId("brush").checked || !current) return;
  stroke = [];
  canvas.setPointerCapture(event.pointerId);
  brush(event);
});
canvas.addEventListener("pointermove", (event) => { if (stroke) brush(event); });
canvas.addEventListener("pointerup", () => {
  if (stroke) answerCovered(stroke);
  stroke = null;
});
byId("brush").addEventListener("change", () => canvas.classList.toggle("brush", byId("brush").checked));
byId("cover").addEventListener("click", () => {
  const { totals, norm } = computeTotals(current.outputs, current.off);
  const slots = slotsOf(current.off.size ? rank(totals)[0] : current.record.prediction.class_id, current.off, norm);
  const marks = slots.map(({ box }) => ({ rect: box }));
  paint(marks);
  answerCovered(marks);
});
byId("uncover").addEventListener("click", () => show(shown));

// ---- where pictures come from -------------------------------------------------------------------------------------

for (const button of document.querySelectorAll("#examples button")) {
  const source = button.querySelector("img").getAttribute("src");
  // from the browser's cache, where the image already is
  const load = async () => new File([await (await fetch(source, { cache: "force-cache" })).blob()], source.split("/").pop());
  button.addEventListener("click", async () => show(makeItem(await load())));
}

const video = byId("video");

function closeCamera() {
  for (const track of video.srcObject?.getTracks() ?? []) track.stop();
  video.srcObject = null;
  byId("viewfinder").hidden = true;
}

byId("camera").hidden = !navigator.mediaDevices; // browsers have it on https and on this machine only
byId("camera").addEventListener("click", async () => {
  try {
    video.srcObject = await navigator.mediaDevices.getUserMedia({ video: { facingMode: "environment" } });
    byId("viewfinder").hidden = false;
    byId("shoot").focus();
  } catch (error) {
    say(`No camera: ${error.message}. Allow it in the browser, or choose a file.`, true);
  }
});
byId("shoot").addEventListener("click", async () => {
  const still = el("canvas", { width: video.videoWidth, height: video.videoHeight });
  still.getContext("2d").drawImage(video, 0, 0);
  closeCamera();
  take([new File([await new Promise((resolve) => { still.toBlob(resolve); })], "camera.png")]);
});
byId("close").addEventListener("click", closeCamera);

say("Loading the model …");
try {
  byId("checked").textContent = await start();
  // pictures that are dropped earlier find nothing to answer them
  evidence.takePictures(take);
  document.documentElement.dataset.ready = "yes";
  for (const control of document.querySelectorAll("#file, #camera, #examples button")) control.disabled = false;
  say("");
} catch (error) {
  say(`This page answers nothing, because the model does not run here as it was verified: ${error.message}`, true);
}
