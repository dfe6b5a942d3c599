"use strict";
// shows the record first, then its drawing; without scripts, the form shows only the drawing
const byId = (id) => document.getElementById(id);
const file = byId("file"), model = byId("model"), token = byId("token"), drop = byId("drop"), send = byId("send");
// the answer to an outdated request is not shown
let current = 0, drawing = "";

function say(text, isError) {
  byId("status").textContent = text;
  byId("status").classList.toggle("alert", Boolean(isError));
}

async function post(image, format) {
  const query = new URLSearchParams({ model: model.value, format, name: image.name || "pasted" });
  const headers = token.value ? { Authorization: `Bearer ${token.value}` } : {};
  const response = await fetch(`explain?${query}`, { method: "POST", body: image, headers });
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

function addFact(name, value) {
  const term = document.createElement("dt"), text = document.createElement("dd");
  term.textContent = name;
  text.textContent = value;
  byId("facts").append(term, text);
}

function showRecord(record) {
  const { prediction, margin, top, status } = record;
  byId("label").textContent = prediction.label;
  byId("facts").replaceChildren();
  if (status === "abstained") addFact("status", "abstained: the margin is too small");
  if (prediction.cosine !== null) addFact("cosine", prediction.cosine.toFixed(4));
  if (prediction.calibrated_probability !== undefined)
    addFact("calibrated probability", prediction.calibrated_probability.toFixed(3));
  if (margin !== null) addFact("margin", `${margin.toFixed(4)} ahead of ${top.length > 1 ? top[1].label : "the runner-up"}`);
  byId("record").textContent = JSON.stringify(record, null, 2);
  byId("figure").hidden = true;
  byId("answer").hidden = false;
}

function showDrawing(blob, format, record) {
  URL.revokeObjectURL(drawing);
  drawing = URL.createObjectURL(blob);
  byId("image").src = byId("open").href = byId("save").href = drawing;
  byId("image").alt = `${format === "sheet" ? "Evidence sheet" : "Overlay"}: why ${record.prediction.label}`;
  byId("save").download = `${format}.${format === "sheet" ? "png" : "jpg"}`;
  byId("figure").hidden = false;
}

async function explain(image) {
  const number = ++current;
  const option = model.selectedOptions ? model.selectedOptions[0] : model;
  const format = option.dataset.format;
  byId("answer").hidden = true;
  send.disabled = true;
  say("Classifying …");
  try {
    const record = await (await post(image, "record")).json();
    if (number !== current) return;
    showRecord(record);
    if (format !== "record") {
      say("Drawing …");
      const blob = await (await post(image, format)).blob();
      if (number !== current) return;
      showDrawing(blob, format, record);
    }
    say("");
  } catch (error) {
    if (number !== current) return;
    const reason = error instanceof TypeError ? "cannot reach the server" : error.message;
    say(`${image.name}: ${reason}`, true);
  } finally {
    if (number === current) send.disabled = false;
  }
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (file.files.length) explain(file.files[0]);
});
file.addEventListener("change", () => { if (file.files.length) explain(file.files[0]); });
document.addEventListener("paste", (event) => {
  const image = [...event.clipboardData.files][0];
  if (image) explain(image);
});
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", name === "dragover");
    if (name !== "drop" || !event.dataTransfer.files.length) return;
    file.files = event.dataTransfer.files;
    explain(file.files[0]);
  });
}
