"use strict";
// shows the record, and the picture with its boxes
const byId = (id) => document.getElementById(id);
const file = byId("file"), model = byId("model"), token = byId("token"), send = byId("send");
const { say } = evidence;
// the answer to an outdated request is not shown
let current = 0;

const headers = () => token.value ? { Authorization: `Bearer ${token.value}` } : {};

async function post(image) {
  const query = new URLSearchParams({ model: model.value, name: image.name || "pasted" });
  const response = await fetch(`explain?${query}`, { method: "POST", body: image, headers: headers() });
  if (response.ok) return response;
  if (response.status === 401) {
    byId("token-field").hidden = false;
    token.focus();
    throw new Error("this server requires a token");
  }
  let reason = `the server answered ${response.status}`;
  try { reason = (await response.json()).error; } catch { /* a proxy answered */ }
  throw new Error(reason);
}

/** Show the tables of slots or regions, of several labels one each, with `look` also their patches. */
function showSlots(record, look = null) {
  const { noun } = (model.selectedOptions?.[0] ?? model).dataset;
  const options = { decorate: (slot, row) => evidence.link(row, slot.channel), look, noun };
  const others = record.evidence?.length ? evidence.otherLabels(record, options) : [];
  byId("slots").replaceChildren(...(record.evidence?.length ? [evidence.evidenceTable(record, options)] : []), ...others.flatMap(
    ({ name, values, table }) => [evidence.el("h3", null, evidence.bdi(name)), evidence.el("p", { class: "soft" }, values), table()]));
}

function showRecord(record) {
  const { status } = record;
  byId("label").replaceChildren(...evidence.headline(record));
  byId("flag").hidden = status === "ok";
  byId("flag").textContent = status === "unknown" ? `Unknown: ${record.reason}`
    : "Abstained: the margin is too small for an answer";
  byId("figures").replaceChildren(...evidence.summary(record));
  showSlots(record);
  byId("record").textContent = JSON.stringify(record, null, 2);
  byId("figure").hidden = true;
  byId("answer").hidden = false;
}

/** Show the picture with its boxes; browsers cannot show every kind that the server reads. */
async function showPicture(file, record) {
  const image = byId("image");
  URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(file);
  image.alt = `The picture, predicted ${record.prediction.label}; the table lists its boxes`;
  await image.decode();
  const others = (record.labels ?? []).slice(1).flatMap((label) => label.evidence ?? []);
  evidence.drawBoxes(byId("boxes"), record.evidence ?? [], record.width, record.height, { record, others });
  byId("figure").hidden = false;
  const query = new URLSearchParams({ model: model.value, class: record.prediction.class_id });
  const response = await fetch(`patches?${query}`, { headers: headers() });
  const { width, height, image: name } = record;
  if (response.ok) showSlots(record, { href: image.src, width, height, name, ...await response.json() });
}

function describeError(image, error) {
  return `${image.name}: ${error instanceof TypeError ? "cannot reach the server" : error.message}`;
}

async function explain(image, others = 0) {
  const number = ++current;
  byId("answer").hidden = true;
  send.disabled = true;
  say("Classifying …");
  try {
    const record = await (await post(image)).json();
    if (number !== current) return;
    showRecord(record);
    await showPicture(image, record).catch(() => {});
    say(others ? `${image.name} is answered; ${others} other ${others === 1 ? "file is" : "files are"} not: this page takes one at a time, \`opal-deploy infer\` any number` : "");
  } catch (error) {
    if (number !== current) return;
    say(describeError(image, error), true);
  } finally {
    if (number === current) send.disabled = false;
  }
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (file.files.length) explain(file.files[0]);
});
evidence.takePictures((files) => {
  file.files = files;
  explain(files[0], files.length - 1);
});
