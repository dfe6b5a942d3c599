"""The report's fixed parts: its style and its explanations. No script, nothing from outside the file."""

from __future__ import annotations

# scripts, frames, forms and every fetch are refused by the browser, whatever a file name tries to be
CONTENT_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

STYLE = """
:root { color-scheme: light dark;
  --paper: #fbfbf9; --card: #fff; --ink: #1c1c1a; --soft: #5d5d58; --line: #dcdcd6; --track: #ecece7;
  --bar: #4a5a68; --alert: #96281b; --warn: #7a5200; }
@media (prefers-color-scheme: dark) { :root {
  --paper: #161615; --card: #1f1f1d; --ink: #ecebe6; --soft: #a9a8a1; --line: #3a3a37; --track: #32322f;
  --bar: #9db2c4; --alert: #ff9b8c; --warn: #f0c060; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", Helvetica, Arial, sans-serif; }
main, header, footer { max-width: 76rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2.5rem; }
h1 { font-size: 1.9rem; line-height: 1.2; font-weight: 600; letter-spacing: -.01em; margin: 0 0 1.5rem;
  overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; font-weight: 600; margin: 2.75rem 0 .75rem; padding-top: .75rem;
  border-top: 1px solid var(--line); }
h3 { font-size: .85rem; font-weight: 400; color: var(--soft); margin: 0; overflow-wrap: anywhere; }
p { margin: .5rem 0; max-width: 44rem; }
.tiles { display: flex; flex-wrap: wrap; gap: 2rem 3rem; margin: 0 0 1.5rem; padding: 0; list-style: none; }
.tiles b { display: block; font-size: 2rem; line-height: 1.1; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--soft); font-size: .9rem; }
.alert b, .alert span { color: var(--alert); }
.warn b, .warn span { color: var(--warn); }
dl.facts { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.5rem; margin: 0; font-size: .95rem; }
dl.facts dt { color: var(--soft); }
dl.facts dd { margin: 0; overflow-wrap: anywhere; }
.how { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: .25rem 2.5rem; }
.how p { font-size: .95rem; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 400; color: var(--soft); font-size: .8rem; }
th, td { padding: .2rem .75rem .2rem 0; vertical-align: middle; overflow-wrap: anywhere; }
th:last-child, td:last-child { padding-right: 0; }
td.n, th.n { text-align: right; white-space: nowrap; overflow-wrap: normal; }
.classes td:first-child { width: 40%; } .classes td.n { width: 5rem; }
.failed td { vertical-align: top; border-top: 1px solid var(--line); padding-top: .35rem; padding-bottom: .35rem; }
.failed td:first-child { width: 35%; } .failed code { white-space: nowrap; }
.track { position: relative; display: block; min-width: 3rem; height: .55rem; background: var(--track);
  border-radius: 1px; }
.track i { position: absolute; top: 0; bottom: 0; background: var(--bar); border-radius: 1px; }
.cards { display: grid; gap: 1.25rem; margin-top: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 21.5rem), 1fr)); }
article { background: var(--card); border: 1px solid var(--line); border-radius: 4px; overflow: hidden;
  break-inside: avoid; }
article img, .nopicture { display: block; width: 100%; max-height: 24rem; object-fit: contain;
  background: var(--track); }
.nopicture { padding: 2rem 1rem; color: var(--soft); text-align: center; font-size: .9rem; }
.body { padding: .85rem 1rem 1rem; }
.answer { font-size: 1.15rem; line-height: 1.3; font-weight: 600; margin: .1rem 0 .35rem; overflow-wrap: anywhere; }
.measures { display: flex; flex-wrap: wrap; gap: 0 1.25rem; margin: 0 0 .6rem; font-variant-numeric: tabular-nums; }
.measures div { display: flex; gap: .4rem; } .measures dt { color: var(--soft); } .measures dd { margin: 0; }
.flag { color: var(--warn); font-weight: 600; font-size: .95rem; margin: 0 0 .35rem; }
.slots th { white-space: nowrap; } .slots td:nth-child(2) { width: 99%; }
.slot { display: inline-block; min-width: 1.6em; padding: 0 .35em; text-align: center; border-radius: 2px;
  font-weight: 600; font-size: .85em; border: 1px solid var(--line); }
.note { color: var(--soft); font-size: .9rem; }
details { margin-top: .6rem; } summary { cursor: pointer; color: var(--soft); font-size: .9rem; }
footer { color: var(--soft); font-size: .85rem; padding-top: 2.5rem; padding-bottom: 3rem; }
@media (max-width: 34rem) {
  dl.facts { grid-template-columns: 1fr; gap: 0; } dl.facts dd { margin-bottom: .5rem; }
  header { padding-top: 1.5rem; } h1 { font-size: 1.5rem; }
  .failed, .failed tbody, .failed tr, .failed td { display: block; width: 100% !important; }
  .failed thead { display: none; } .failed td + td { border-top: 0; padding-top: 0; } }
@media print { :root { --paper: #fff; --card: #fff; --ink: #000; --soft: #444; --line: #bbb; --track: #e6e6e6;
    --bar: #4a5a68; --alert: #96281b; --warn: #7a5200; }
  body { font-size: 10pt; } main, header, footer { max-width: none; padding-left: 0; padding-right: 0; }
  .cards { grid-template-columns: 1fr 1fr; } article img { max-height: 16rem; }
  .track, .track i, .slot { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  h2 { break-after: avoid; } }
"""

HOW_TO_READ = """
<h2 id="how">How to read this</h2>
<div class="how">
<p><strong>Boxes.</strong> Each numbered box is the one cell of the network's feature map where that slot of the
predicted class reached its maximum. They come out of the same forward pass as the answer; nothing was computed
afterwards to justify it. Slots that chose the same cell share a border in both colours.</p>
<p><strong>Cosine</strong> says how well the image aligns with the class: 1 is perfect alignment.
<strong>Margin</strong> is the cosine of the predicted class minus that of the runner-up: near 0, two classes fit
about equally well.</p>
<p><strong>Contribution</strong> is what a slot adds. With the Euclidean distance the contributions add up to the
cosine; with the others they are parts of the distance, where less is closer, or there are scores alone.</p>
<p><strong>No confidence is given.</strong> The logits are minus distances, not log-odds; a softmax over them would be
nearly flat and is no probability. Judge by cosine and margin, and by whether the boxes lie on what matters.</p>
</div>
"""
