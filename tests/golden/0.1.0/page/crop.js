// The frame that crops a picture: by mouse, by a finger or two, by the wheel, and by keys.
const { el } = evidence;
const LEAST = 0.04, STEP = 0.01, REST = 400;
const HELP = "Arrow keys move the frame, with Shift they resize it; + and − scale it; Escape takes the whole picture.";
const KEYS = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP] };
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

/**
 * Put a frame on a picture in its element, `photo`. It can be dragged while it is shown and `isFree()`.
 * `changed` is called once a move has ended.
 */
export function createFrame(photo, isFree, changed) {
  const corners = ["nw", "ne", "sw", "se"].map((name) => el("span", { class: `corner ${name}` }));
  const frame = el("div", { class: "crop", role: "group", tabindex: "0", "aria-roledescription": "crop frame" }, ...corners);
  frame.hidden = true;
  // below the boxes, which stay in reach
  photo.firstElementChild.after(frame);
  // corners x0, y0, x1, y1 in shares of the picture, as they are, and as `changed` last saw them
  let rect = [0, 0, 1, 1], reported = rect, size = [1, 1], timer;
  const pointers = new Map();
  let grip = null;

  const pixels = ([x0, y0, x1, y1]) => {
    const [width, height] = size;
    const [left, top] = [Math.min(Math.round(x0 * width), width - 1), Math.min(Math.round(y0 * height), height - 1)];
    return [left, top, Math.max(Math.round(x1 * width), left + 1), Math.max(Math.round(y1 * height), top + 1)];
  };
  const isWhole = () => rect.every((value, i) => value === (i < 2 ? 0 : 1));

  function place([x0, y0, x1, y1]) {
    rect = [x0, y0, x1, y1];
    Object.assign(frame.style, {
      left: `${100 * x0}%`, top: `${100 * y0}%`, width: `${100 * (x1 - x0)}%`, height: `${100 * (y1 - y0)}%`,
    });
    photo.classList.toggle("cropped", !frame.hidden && !isWhole());
    const [left, top, right, bottom] = pixels(rect);
    frame.setAttribute("aria-label", isWhole() ? `Crop: the whole picture. ${HELP}`
      : `Crop: ${right - left} x ${bottom - top} pixels at ${left}, ${top}. ${HELP}`);
  }

  /** Put the frame between two corners, in either order, inside the picture and no smaller than may be. */
  function span(ax, ay, bx, by) {
    const side = (a, b) => {
      const [low, high] = [clamp(Math.min(a, b), 0, 1), clamp(Math.max(a, b), 0, 1)];
      return high - low >= LEAST ? [low, high] : a <= b ? [Math.min(low, 1 - LEAST), Math.min(low, 1 - LEAST) + LEAST]
        : [Math.max(high, LEAST) - LEAST, Math.max(high, LEAST)];
    };
    const [x0, x1] = side(ax, bx), [y0, y1] = side(ay, by);
    place([x0, y0, x1, y1]);
  }

  /** Move a frame, which keeps its size. */
  function move([x0, y0, x1, y1], dx, dy) {
    const [x, y] = [clamp(dx, -x0, 1 - x1), clamp(dy, -y0, 1 - y1)];
    place([x0 + x, y0 + y, x1 + x, y1 + y]);
  }

  /** Scale a frame around a point of the picture. */
  function scale([x0, y0, x1, y1], factor, x, y) {
    const most = LEAST / Math.min(x1 - x0, y1 - y0), by = Math.max(factor, most);
    span(x + (x0 - x) * by, y + (y0 - y) * by, x + (x1 - x) * by, y + (y1 - y) * by);
  }

  function report(delay) {
    clearTimeout(timer);
    timer = setTimeout(() => {
      if (String(pixels(rect)) === String(pixels(reported))) return;
      reported = rect;
      changed(pixels(rect));
    }, delay);
  }

  const isOn = () => !frame.hidden && isFree();
  const whereIs = ({ clientX, clientY }) => {
    const area = photo.getBoundingClientRect();
    return [(clientX - area.left) / area.width, (clientY - area.top) / area.height];
  };
  const pinched = () => {
    const [[ax, ay], [bx, by]] = pointers.values();
    return { distance: Math.max(Math.hypot(ax - bx, ay - by), 1e-3), x: (ax + bx) / 2, y: (ay + by) / 2 };
  };

  photo.addEventListener("pointerdown", (event) => {
    if (!isOn() || event.button || pointers.size === 2) return;
    const [x, y] = whereIs(event), corner = event.target.classList?.contains("corner") ? event.target.classList[1] : null;
    const isInside = x > rect[0] && x < rect[2] && y > rect[1] && y < rect[3];
    pointers.set(event.pointerId, [x, y]);
    if (pointers.size === 2) grip = { kind: "pinch", from: rect, ...pinched() };
    else if (corner) {
      // the corner opposite stays
      const [fx, fy] = [corner.includes("w") ? rect[2] : rect[0], corner.includes("n") ? rect[3] : rect[1]];
      grip = { kind: "span", from: rect, x: fx, y: fy };
    } else if (isInside && !isWhole()) grip = { kind: "move", from: rect, x, y };
    // a mouse draws a new frame; a finger scrolls the page, unless another one joins it
    else grip = event.pointerType === "touch" ? { kind: "wait", from: rect } : { kind: "draw", from: rect, x, y };
    photo.setPointerCapture(event.pointerId);
    event.preventDefault();
    frame.focus({ preventScroll: true, focusVisible: false });
  });
  photo.addEventListener("pointermove", (event) => {
    if (!grip || !pointers.has(event.pointerId)) return;
    const [x, y] = whereIs(event);
    pointers.set(event.pointerId, [x, y]);
    if (grip.kind === "move") move(grip.from, x - grip.x, y - grip.y);
    else if (grip.kind === "span") span(grip.x, grip.y, x, y);
    else if (grip.kind === "draw") {
      // a click is no frame
      if (Math.min(Math.abs(x - grip.x), Math.abs(y - grip.y)) < LEAST) place(grip.from);
      else span(grip.x, grip.y, x, y);
    }
    else if (grip.kind === "pinch" && pointers.size === 2) {
      const now = pinched();
      scale(grip.from, now.distance / grip.distance, grip.x, grip.y);
      move(rect, now.x - grip.x, now.y - grip.y);
    }
  });
  photo.addEventListener("pointerup", ({ pointerId }) => {
    if (!pointers.delete(pointerId)) return;
    // what is left of a pinch moves nothing
    grip = pointers.size ? { kind: "wait", from: rect } : null;
    if (!grip) report(0);
  });
  photo.addEventListener("pointercancel", ({ pointerId }) => {
    if (!pointers.delete(pointerId)) return;
    if (grip) place(grip.from);
    grip = null;
  });
  photo.addEventListener("wheel", (event) => {
    // as browsers report two fingers on a touchpad
    if (!isOn() || !event.ctrlKey) return;
    event.preventDefault();
    scale(rect, Math.exp(event.deltaY / -200), ...whereIs(event));
    report(REST);
  }, { passive: false });
  frame.addEventListener("keydown", (event) => {
    const step = KEYS[event.key], [x0, y0, x1, y1] = rect;
    if (step && event.shiftKey) span(x0, y0, Math.max(x1 + step[0], x0 + LEAST), Math.max(y1 + step[1], y0 + LEAST));
    else if (step) move(rect, ...step);
    else if (event.key === "+" || event.key === "=") scale(rect, 1.05, (x0 + x1) / 2, (y0 + y1) / 2);
    else if (event.key === "-") scale(rect, 0.95, (x0 + x1) / 2, (y0 + y1) / 2);
    else if (event.key === "Escape") place([0, 0, 1, 1]);
    else return;
    event.preventDefault();
    report(REST);
  });

  return {
    /** Show the frame at a crop [x0, y0, x1, y1] of a picture, in its pixels, or hide it. */
    set(isShown, width, height, [x0, y0, x1, y1]) {
      clearTimeout(timer);
      frame.hidden = !isShown;
      photo.classList.toggle("framed", isShown);
      size = [width, height];
      place([x0 / width, y0 / height, x1 / width, y1 / height]);
      reported = rect;
    },
  };
}
