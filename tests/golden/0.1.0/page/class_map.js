"use strict";
// Which channels speak for which class, and with what weight: `ClassMap.to_dict` for the pages that compute with scores.
// The arithmetic is that of opal_deploy/artifact/class_map.py.

/** The map without the channels of a set, besides those that were dropped for good. */
function readClassMap({ num_prototypes: size, offsets, prototypes, strengths, biases, unit_length, dropped }, off = new Set()) {
  const kept = Uint8Array.from({ length: size }, (_, channel) => !off.has(channel));
  for (const channel of dropped) kept[channel] = 0;
  const weights = Float64Array.from(strengths, (strength, entry) => kept[prototypes[entry]] && strength);
  const classes = biases.map((_, classId) => [offsets[classId], offsets[classId + 1]]);
  for (const [start, stop] of unit_length ? classes : []) {
    const length = Math.sqrt(weights.subarray(start, stop).reduce((sum, weight) => sum + weight * weight, 0));
    for (let entry = start; entry < stop; entry++) weights[entry] /= length;
  }
  /** The slots of a class that are left: {slot, channel, weight}. */
  const slots = (classId) => Array.from(weights.subarray(...classes[classId]), (weight, slot) =>
    ({ slot, channel: prototypes[offsets[classId] + slot], weight })).filter(({ channel, weight }) => kept[channel] && weight);
  /** The number of a slot among those of all classes. */
  const entry = (classId, slot) => offsets[classId] + slot;
  /** [class, slot] of every class that a channel speaks for. */
  const owners = (channel) => prototypes.flatMap((own, entry) => {
    if (own !== channel || !strengths[entry]) return [];
    const classId = classes.findIndex(([, stop]) => entry < stop);
    return [[classId, entry - offsets[classId]]];
  });
  /** The norm of one image's scores, as the embedding divides by it; `from` is the place of the first. */
  const norm = (scores, epsilon, from = 0) => {
    let squares = 0;
    for (let channel = 0; channel < size; channel++) if (kept[channel]) squares += scores[from + channel] ** 2;
    return Math.sqrt(squares) + epsilon;
  };
  /** Every class's total of one image's values, which are scores divided by `scale`. */
  const totals = (scores, scale = 1, from = 0) => classes.map(([start, stop], classId) => {
    let total = biases[classId];
    for (let entry = start; entry < stop; entry++) total += scores[from + prototypes[entry]] / scale * weights[entry];
    return total;
  });
  return { size, slots, entry, owners, norm, totals };
}

/** The best total minus the runner-up's, of totals and the classes in their order; null for one class. */
const findMargin = (totals, order) => order.length > 1 ? totals[order[0]] - totals[order[1]] : null;
