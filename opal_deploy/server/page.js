"use strict";
// the record first, which is the answer in words, then its drawing; without scripts the form shows the drawing alone
const byId = (id) => document.getElementById(id);
const file = byId("file"), model = byId("model"), token = byId("token"), drop = byId("drop"), send = byId("send");
// of a request that another one has overtaken, nothing is shown
let current = 0, drawing = "";

function say(text, isError) {
  byId("status").textContent = text;
  byId("status").classList.toggle("alert", Boolean(isError));
}

async function post(picture, format) {
  const query = new URLSearchParams({ model: model.value, format, name: picture.name || "pasted" });
  const headers = token.value ? { Authorization: `Bearer ${token.value}` } : {};
  const response = await fetch(`explain?${query}`, { method: "POST", body: picture, headers });
  if (response.ok) return response;
  if (response.status === 401) {
    byId("token-field").hidden = false;
    token.focus();
    throw new Error("this server asks for a token");
  }
  let reason = `the server answered ${response.status}`;
  try { reason = (await response.json()).error; } catch { /* not ours: a proxy's */ }
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
  if (status === "abstained") addFact("status", "abstained: its margin is too small");
  if (prediction.cosine !== null) addFact("cosine", prediction.cosine.toFixed(4));
  if (prediction.calibrated_probability !== undefined)
    addFact("calibrated probability", prediction.calibrated_probability.toFixed(3));
  if (margin !== null) addFact("margin", `${margin.toFixed(4)} before ${top.length > 1 ? top[1].label : "the next"}`);
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

async function explain(picture) {
  const number = ++current;
  const option = model.selectedOptions ? model.selectedOptions[0] : model;
  const format = option.dataset.format;
  byId("answer").hidden = true;
  send.disabled = true;
  say("Looking at the picture …");
  try {
    const record = await (await post(picture, "record")).json();
    if (number !== current) return;
    showRecord(record);
    if (format !== "record") {
      say("Drawing …");
      const blob = await (await post(picture, format)).blob();
      if (number !== current) return;
      showDrawing(blob, format, record);
    }
    say("");
  } catch (error) {
    if (number !== current) return;
    const reason = error instanceof TypeError ? "the server cannot be reached" : error.message;
    say(`${picture.name}: ${reason}`, true);
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
  const picture = [...event.clipboardData.files][0];
  if (picture) explain(picture);
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
