// Filters, sorts and shows the cards of this page's own data. Texts become text nodes only: nothing here parses markup.
(() => {
  const $ = (id) => document.getElementById(id);
  const read = (id) => JSON.parse($(id).textContent);
  const config = read("config"), rows = read("index"), labels = config.labels;
  // columns of the index, in the order of Card.index_row
  const NUMBER = 0, NAME = 1, STATUS = 2, CLASS = 3, LABEL = 4, MARGIN = 5, VALUE = 6, CODE = 7;
  const OK = 0, ABSTAINED = 1, UNKNOWN = 2, FAILED = 3;
  const { el, bdi, number, table, NUMERIC } = evidence;
  const cards = $("cards"), sheet = $("sheet"), sheetBody = $("sheet-body"), tools = $("tools");
  const lower = rows.map((row) => row[NAME].toLowerCase());
  const blocks = [], orders = {};
  let view = [], page = 0, opened = -1;

  // ---- elements of one image

  function details(position) {
    const block = Math.floor(position / config.block);
    blocks[block] ??= read("d" + block);
    return blocks[block][position % config.block];
  }

  function source(position) {
    const number = rows[position][NUMBER];
    if (config.image_mode === "files") return details(position).overlay;
    const block = $("p" + number);
    return block && "data:image/jpeg;base64," + block.textContent;
  }

  const pluralize = (n, one, many) => n.toLocaleString("en") + " " + (n === 1 ? one : many);

  /** The record of an answered image, as far as the page has it. */
  function record(position) {
    const row = rows[position], d = details(position);
    const answer = ([label, value]) => ({ label: labels[label], cosine: d.cosine ? value : null, logit: value });
    return {
      status: ["ok", "abstained", "unknown"][row[STATUS]], margin: row[MARGIN], width: d.size[0], height: d.size[1],
      prediction: { ...answer([row[CLASS], row[VALUE]]), calibrated_probability: d.probability ?? undefined },
      top: d.top.map(answer), meaning: evidence.MEANINGS[d.meaning],
      evidence: readSlots(d.slots, ""), rest: d.rest, bias: d.bias,
      labels: d.labels?.map(([label, logit, probability, rest, slots], i) => (
        { label: labels[label], logit, probability, rest, evidence: readSlots(slots, `${row[NUMBER]}/${i}`) })),
    };
  }

  // each label's regions have names of their own, by which rows light up boxes
  const readSlots = (slots, owner) => slots.map(([slot, cell, score, contribution, box, name]) => (
    { slot, cell, score, contribution, box, name, ...(owner && { channel: `${owner}/${slot}` }) }));

  const byStrength = (record) => {
    const strength = ({ contribution, score }) => contribution ?? score;
    return { ...record, evidence: [...record.evidence].sort((a, b) => strength(b) - strength(a)) };
  };

  function topTable(d) {
    const body = d.top.map(([label, value]) => el("tr", null, el("td", null, bdi(labels[label])), el("td", { class: "n" }, number(value))));
    return table("top", [["class"], [d.cosine ? "cosine" : "logit", NUMERIC]], body);
  }

  /** What the table of slots shows of the image and of training images. */
  function look(position) {
    const row = rows[position], d = details(position), address = source(position), isFile = config.image_mode === "files";
    if (!address || row[STATUS] === FAILED) return null;
    const [width, height] = d.size;
    return { href: address, width: isFile ? width * d.overlay_width : width, height, isHigh: d.drawn, name: row[NAME], reach: config.reach, patches: config.patches[row[CLASS]] };
  }

  function photo(position) {
    const row = rows[position], d = details(position), address = source(position);
    if (row[STATUS] === FAILED) return null;
    if (!address) return el("p", { class: "no-image" }, d.undrawn || "image not kept");
    const boxes = d.slots.length ? "with evidence boxes" : "without boxes";
    const image = el("img", { alt: row[NAME] + ", " + boxes + "; predicted " + labels[row[CLASS]], decoding: "async", loading: "lazy" });
    const layer = el("div", { class: "boxes", "aria-hidden": "true" }), [width, height] = d.size;
    const shown = record(position), others = (shown.labels ?? []).slice(1).flatMap((label) => label.evidence);
    evidence.drawBoxes(layer, shown.evidence, width, height, { record: shown, others, fields: d.fields, isDrawn: d.drawn });
    const figure = el("figure", { class: "photo" }, image, layer);
    figure.style.aspectRatio = width + " / " + height;
    figure.style.maxWidth = "calc(18rem * " + width / height + ")";
    if (config.image_mode === "files") image.style.width = 100 * d.overlay_width + "%";
    image.src = address;
    return figure;
  }

  function answer(position) {
    const row = rows[position], d = details(position), parts = [];
    if (row[STATUS] === FAILED) {
      parts.push(el("p", { class: "flag alert" }, "Failed: ", el("code", null, row[CODE])), el("p", { class: "note" }, d.message));
    } else {
      parts.push(el("p", { class: "answer" }, ...evidence.headline(record(position))));
    }
    if (row[LABEL] !== null) {
      if (row[CLASS] === null) parts.push(el("p", { class: "verdict" }, "label: ", bdi(labels[row[LABEL]])));
      else if (row[CLASS] === row[LABEL]) parts.push(el("p", { class: "verdict" }, "✓ correct"));
      else parts.push(el("p", { class: "verdict wrong" }, "✗ label: ", bdi(labels[row[LABEL]])));
    }
    if (d.flag) parts.push(el("p", { class: "flag" }, d.flag));
    return row[STATUS] === FAILED ? parts : [...parts, ...evidence.summary(record(position))];
  }

  // most details stay closed: their contents are created on opening
  function lazyDetails(summary, content) {
    const node = el("details", null, el("summary", null, summary));
    node.addEventListener("toggle", () => node.append(content()), { once: true });
    return node;
  }

  const otherLabels = (position, options) =>
    evidence.otherLabels(record(position), { ...options, decorate: (slot, row) => evidence.link(row, slot.channel) });

  function card(position) {
    const row = rows[position], d = details(position), parts = answer(position);
    if (row[STATUS] !== FAILED) {
      const options = { look: look(position), noun: config.noun };
      parts.push(d.slots.length ? lazyDetails(pluralize(d.slots.length, config.noun, `${config.noun}s`), () => evidence.evidenceTable(record(position), options))
        : el("p", { class: "note" }, config.no_evidence));
      parts.push(...otherLabels(position, options).map(({ name, probability, table }) => lazyDetails(`${name}, ${probability}`, table)));
      if (d.top.length) parts.push(lazyDetails(pluralize(d.top.length, "closest class", "closest classes"), () => topTable(d)));
    }
    const link = el("a", { href: "#i=" + row[NUMBER] }, bdi(row[NAME]));
    return el("article", { id: "i=" + row[NUMBER] }, photo(position), el("div", { class: "body" }, parts.shift(), el("h3", null, link), ...parts));
  }

  function buildSheet(position) {
    const row = rows[position], d = details(position), figure = el("div"), text = el("div", null, ...answer(position));
    const shown = photo(position);
    if (shown) {
      if (shown.style.aspectRatio) shown.style.maxWidth = "calc(76vh * " + d.size[0] / d.size[1] + ")";
      figure.append(shown);
    }
    if (d.overlay) {
      const link = el("a", { target: "_blank", rel: "noopener" }, "Overlay in full size");
      link.href = d.overlay;
      figure.append(el("p", { class: "note" }, link, " (file next to this page)"));
    }
    if (row[STATUS] !== FAILED) {
      const options = { look: look(position), noun: config.noun }, heading = { slot: "Slots", region: "Regions" }[config.noun];
      text.append(...(d.slots.length ? [el("h3", null, heading), evidence.evidenceTable(byStrength(record(position)), options)] : [el("p", { class: "note" }, config.no_evidence)]));
      text.append(...otherLabels(position, options).flatMap(({ name, values, table }) => [el("h3", null, bdi(name)), el("p", { class: "note" }, values), table()]));
      if (d.top.length) text.append(el("h3", null, "Closest classes"), topTable(d));
    }
    const title = el("h2", { id: "sheet-title", tabindex: "-1" }, bdi(row[NAME]));
    return [title, el("div", { class: "sheet" }, figure, text)];
  }

  // ---- filters and orders

  const margins = rows.map((row) => row[MARGIN]).filter((margin) => margin !== null).sort((a, b) => a - b);
  const median = margins[Math.floor(margins.length / 2)];
  const chosenOrder = () => tools.elements.namedItem("sort").value;

  /** All positions in an order; images without a margin come last. */
  function order(name) {
    if (orders[name]) return orders[name];
    const all = rows.map((_, position) => position);
    const rank = { margin: (margin) => margin, typical: (margin) => Math.round(1e6 * Math.abs(margin - median)) }[name];
    const place = (position) => rows[position][MARGIN] === null ? Infinity : rank(rows[position][MARGIN]);
    if (rank) all.sort((a, b) => place(a) === place(b) ? a - b : place(a) - place(b));
    return (orders[name] = all);
  }

  function filter() {
    const text = $("search").value.trim().toLowerCase(), [state, code] = $("status").value.split(/:(.*)/s);
    const chosen = (id) => $(id).value === "" ? null : Number($(id).value);
    const predicted = chosen("class"), label = chosen("label"), verdict = $("verdict").value;
    const status = { ok: OK, abstained: ABSTAINED, unknown: UNKNOWN, error: FAILED }[state];
    const matches = (position) => {
      const row = rows[position];
      return (!text || lower[position].includes(text))
        && (predicted === null || row[CLASS] === predicted) && (label === null || row[LABEL] === label)
        && (status === undefined || row[STATUS] === status) && (!code || row[CODE] === code)
        && (!verdict || (row[LABEL] !== null && row[CLASS] !== null && (row[LABEL] === row[CLASS]) === (verdict === "correct")));
    };
    view = order(chosenOrder()).filter(matches);
    $("typical").hidden = chosenOrder() !== "typical" || !margins.length;
    const active = ["class", "label", "verdict", "status"].filter((id) => $(id).value !== "").length;
    $("active").textContent = active ? "(" + active + " active)" : "";
  }

  function showStatus() {
    const pages = Math.max(1, Math.ceil(view.length / config.page));
    const start = page * config.page, end = Math.min(view.length, start + config.page);
    $("found").textContent = pluralize(view.length, "image", "images") + (view.length === rows.length ? "" : " of " + rows.length.toLocaleString("en"))
      + (pages > 1 ? ", " + (start + 1).toLocaleString("en") + " to " + end.toLocaleString("en") + " shown" : "");
    $("page").textContent = "page " + (page + 1).toLocaleString("en") + " of " + pages.toLocaleString("en");
    $("pager").hidden = pages === 1;
    $("previous").disabled = page === 0;
    $("next").disabled = page >= pages - 1;
  }

  function draw() {
    const shown = view.slice(page * config.page, (page + 1) * config.page);
    cards.replaceChildren(...(shown.length ? shown.map(card) : [el("p", { class: "note" }, "No image matches these filters.")]));
    showStatus();
  }

  function apply() {
    filter();
    page = 0;
    draw();
  }

  function changePage(by) {
    page += by;
    draw();
    $("images").scrollIntoView();
  }

  // ---- the dialog of one image

  function address(hash) {
    try { history.replaceState(null, "", location.href.split("#")[0] + hash); } catch { /* not allowed for this page: keep the address */ }
  }

  function open(position) {
    opened = position;
    const place = view.indexOf(position);
    sheetBody.replaceChildren(...buildSheet(position));
    $("sheet-place").textContent = place < 0 ? "hidden by the filters" : (place + 1).toLocaleString("en") + " of " + view.length.toLocaleString("en");
    $("sheet-previous").disabled = place <= 0;
    $("sheet-next").disabled = place < 0 || place === view.length - 1;
    document.body.classList.add("sheet-open");
    if (!sheet.open) sheet.showModal();
    sheet.scrollTop = 0;
    $("sheet-title").focus({ preventScroll: true });
    address("#i=" + rows[position][NUMBER]);
  }

  function step(by) {
    const place = view.indexOf(opened);
    if (place >= 0 && view[place + by] !== undefined) open(view[place + by]);
  }

  sheet.addEventListener("close", () => {
    const place = view.indexOf(opened);
    document.body.classList.remove("sheet-open");
    if (location.hash.startsWith("#i=")) address("");
    if (place < 0) return;
    if (Math.floor(place / config.page) !== page) { page = Math.floor(place / config.page); draw(); }
    cards.querySelectorAll("h3 a")[place % config.page]?.focus();
  });

  function openFromHash() {
    const [, number] = /^#i=(.*)$/s.exec(location.hash) || [];
    if (number === undefined) { if (sheet.open) sheet.close(); return; }
    const position = rows.findIndex((row) => String(row[NUMBER]) === number);
    if (position >= 0) open(position);
    else $("found").textContent = "The linked image is not on this page.";
  }

  document.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!sheet.open || !by || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    step(by);
  });

  // ---- the form, the tables, the buttons

  function fill(id, entries) {
    for (const [value, text] of entries) $(id).append(el("option", { value }, text));
  }

  function count(column) {
    const counts = new Map();
    for (const row of rows) if (row[column] !== null) counts.set(row[column], (counts.get(row[column]) || 0) + 1);
    return counts;
  }

  function options(column) {
    const collator = new Intl.Collator("en", { numeric: true });
    return [...count(column)].sort((a, b) => collator.compare(labels[a[0]], labels[b[0]])).map(([label, n]) => [label, labels[label] + " (" + n + ")"]);
  }

  function fillForm() {
    fill("class", options(CLASS));
    fill("label", options(LABEL));
    const states = count(STATUS), codes = count(CODE);
    for (const [state, value, text] of [[OK, "ok", "answered"], [ABSTAINED, "abstained", "abstained"],
      [UNKNOWN, "unknown", "unknown"], [FAILED, "error", "failed"]]) {
      if (states.get(state)) fill("status", [[value, text + " (" + states.get(state) + ")"]]);
    }
    codes.delete("");
    fill("status", [...codes].map(([code, n]) => ["error:" + code, "failed: " + code + " (" + n + ")"]));
    for (const cell of document.querySelectorAll("td[data-class]")) {
      const predicted = labels.indexOf(cell.dataset.class), label = labels.indexOf(cell.dataset.label);
      const description = (cell.dataset.label === undefined ? "" : "label " + cell.dataset.label + ", ") + "predicted " + cell.dataset.class;
      const button = el("button", { type: "button", "aria-label": cell.textContent + ": " + description, title: description }, cell.textContent);
      button.addEventListener("click", () => {
        tools.reset();
        $("class").value = String(predicted);
        $("label").value = label < 0 ? "" : String(label);
        $("filters").open = true;
        apply();
        $("images").scrollIntoView();
        $("images").focus({ preventScroll: true });
      });
      cell.replaceChildren(button);
    }
  }

  document.documentElement.dataset.scripts = "on";
  $("typical").textContent = `Typical answers first: margins closest to the median, ${number(median ?? null)}.`;
  fillForm();
  tools.reset();
  apply();
  tools.addEventListener("input", apply);
  tools.addEventListener("submit", (event) => event.preventDefault());
  tools.addEventListener("reset", () => setTimeout(apply));
  $("previous").addEventListener("click", () => changePage(-1));
  $("next").addEventListener("click", () => changePage(1));
  cards.addEventListener("click", (event) => event.target.closest(".photo")?.closest("article").querySelector("h3 a").click());
  $("sheet-previous").addEventListener("click", () => step(-1));
  $("sheet-next").addEventListener("click", () => step(1));
  $("sheet-fields").hidden = !$("show-fields");
  $("sheet-fields").addEventListener("click", () => $("show-fields").click());
  $("sheet-close").addEventListener("click", () => sheet.close());
  addEventListener("hashchange", openFromHash);
  openFromHash();
})();
