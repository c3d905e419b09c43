"""The page's style sheet: one column on a phone, two on a screen, black on white on paper, light or dark as its reader
likes.

Colours of data are those of Okabe and Ito, which readers with colour blindness can tell apart, darker or lighter where
text needs the contrast; nothing is told by colour alone.
"""

CSS = """
:root {
  color-scheme: light dark;
  --ink: #1b1f24; --soft: #57606a; --page: #ffffff; --card: #f5f6f8; --edge: #d5d9de; --grid: #e4e7ea;
  --first: #0072b2; --second: #b85000; --bad: #c2410c; --good: #00704f; --link: #005a8d;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6e8ea; --soft: #a4acb5; --page: #14171a; --card: #1d2125; --edge: #3a4047; --grid: #2c3136;
    --first: #56b4e9; --second: #e69f00; --bad: #ff8a5c; --good: #3fc79a; --link: #7cc4f0;
  }
}
@media print {
  :root {
    color-scheme: light;
    --ink: #000; --soft: #444; --page: #fff; --card: #fff; --edge: #bbb; --grid: #ddd;
    --first: #0072b2; --second: #b85000; --bad: #c2410c; --good: #00704f; --link: #000;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
header, nav, main, footer { max-width: 76rem; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 2rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 2.75rem 0 .6rem; padding-bottom: .3rem; border-bottom: 1px solid var(--edge); }
h3 { font-size: 1rem; margin: 1.6rem 0 .4rem; }
p { margin: .5rem 0; max-width: 46rem; overflow-wrap: anywhere; }
.soft, figcaption span, dt { color: var(--soft); }
a { color: var(--link); }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; list-style: none; margin: 1rem 0 0; padding: 0; }
code, pre { font: .86em/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, "Liberation Mono", monospace; }
code { overflow-wrap: anywhere; }
pre {
  background: var(--card); border: 1px solid var(--edge); border-radius: 6px; padding: .8rem 1rem; margin: .6rem 0;
  overflow: auto; max-height: 30rem;
}
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: .75rem; margin: 1rem 0; }
.cards > div { background: var(--card); border: 1px solid var(--edge); border-radius: 8px; padding: .65rem .85rem; }
.cards dt { font-size: .82rem; }
.cards dd { margin: 0; font-size: 1.3rem; line-height: 1.35; overflow-wrap: anywhere; }
.cards dd small { display: block; font-size: .8rem; color: var(--soft); line-height: 1.35; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); gap: 1.75rem 2rem; }
figure { margin: 0; break-inside: avoid; min-width: 0; }
.figures figure { display: grid; grid-template-rows: subgrid; grid-row: span 2; row-gap: .35rem; align-items: start; }
figcaption { font-weight: 600; }
figcaption span { display: block; font-weight: 400; font-size: .86rem; line-height: 1.4; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
svg image { image-rendering: pixelated; }
.scroll { overflow-x: auto; margin: .6rem 0; }
.scroll:focus-visible, pre:focus-visible, a:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .32rem 1.1rem .32rem 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
thead th { font-weight: 600; border-bottom: 1px solid var(--edge); }
tbody th { font-weight: 400; }
.number { text-align: right; white-space: nowrap; }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
.good, .bad { font-weight: 600; }
.good { color: var(--good); }
.bad { color: var(--bad); }
.notes { border-left: 3px solid var(--second); padding: .1rem 0 .1rem 1rem; margin: 1.25rem 0; }
.notes ul { margin: .3rem 0; padding-left: 1.1rem; overflow-wrap: anywhere; }
footer { margin-top: 3rem; padding-top: .8rem; padding-bottom: 2.5rem; font-size: .86rem; color: var(--soft); }
@media (max-width: 30rem) {
  h1 { font-size: 1.4rem; }
  header, nav, main, footer { padding-left: .9rem; padding-right: .9rem; }
  .cards { grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .5rem; }
  .cards dd { font-size: 1.12rem; }
}
@media print {
  body { font-size: 10pt; }
  nav { display: none; }
  h2 { margin-top: 1.5rem; break-after: avoid; }
  h3 { break-after: avoid; }
  pre { max-height: none; overflow: visible; white-space: pre-wrap; overflow-wrap: anywhere; }
  .scroll { overflow: visible; }
  tr { break-inside: avoid; }
  .figures { grid-template-columns: 1fr 1fr; gap: 1rem; }
  svg image, .cards > div { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
}
"""
