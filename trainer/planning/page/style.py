"""The style of every page: one sheet, for light and dark, from the width of a phone up.

Colours of series are the custom property `--hue` of the classes c0 to c11; what draws with it says how.
"""

NUM_COLOURS = 12
# Told apart by lightness as well as by hue where two stand side by side, on white and on near-black.
_LIGHT = (
    "#2f6fb5", "#d9730d", "#2e8b57", "#b83280", "#7a5cb8", "#8c6d46",
    "#1796a8", "#c23b4b", "#7d8b1f", "#5f6b76", "#c99a00", "#4457c9",
)  # fmt: skip
_DARK = (
    "#6ca6e8", "#f0a05a", "#5fc08a", "#e57cb7", "#ab92e6", "#c4a57c",
    "#54c4d4", "#ee7f8b", "#b6c552", "#9aa6b1", "#e8c34a", "#8b9bf5",
)  # fmt: skip

_SHEET = """
:root { color-scheme: light dark;
        --ink: #1b1f24; --faint: #5d6670; --paper: #ffffff; --line: #d8dee4; --free: #e6eaee; --good: #1a7f37; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --faint: #9198a1; --paper: #0d1117; --line: #30363d; --free: #21262d; --good: #56d364; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
       max-width: 58rem; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; line-height: 1.3; }
h2 { font-size: 1.05rem; margin-top: 2rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 0.9rem; color: var(--faint); font-weight: normal; margin: 1rem 0 0.2rem; }
p { margin: 0.4rem 0; }
pre { white-space: pre-wrap; font: 13px/1.45 ui-monospace, monospace; border-left: 3px solid var(--line);
      padding-left: 0.8rem; margin: 0.2rem 0; }
.axis { margin: 0; text-align: right; font-size: 0.8rem; color: var(--faint); }
.scroll { overflow-x: auto; margin: 0.4rem 0; }
table { border-collapse: collapse; font-size: 0.85rem; overflow-wrap: normal; }
th, td { padding: 0.15rem 0.6rem; text-align: left; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: normal; }
.right { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.best { font-weight: 600; color: var(--good); }
svg { display: block; width: 100%; overflow: visible; }
svg text { fill: var(--ink); font-size: 12px; } svg text.faint { fill: var(--faint); }
svg text.halo { paint-order: stroke; stroke: var(--paper); stroke-width: 3px; }
.free { fill: var(--free); } .part { fill: var(--hue); }
.key { display: inline-block; width: 0.8em; height: 0.8em; background: var(--hue); border-radius: 2px; }
.key.dashed { background: none; height: 0; border-top: 2px dashed var(--hue); border-radius: 0; vertical-align: 0.3em; }
.keys { display: flex; flex-wrap: wrap; gap: 0 1rem; list-style: none; margin: 0.2rem 0; padding: 0;
        font-size: 0.8rem; color: var(--faint); }
.chart { display: grid; grid-template-columns: 4.2rem minmax(0, 1fr); gap: 0 0.4rem; }
.line { fill: none; stroke: var(--hue); stroke-width: 1.8px; stroke-linejoin: round; stroke-linecap: round;
        vector-effect: non-scaling-stroke; }
.line.dashed { stroke-dasharray: 6 5; stroke-linecap: butt; }
.area { fill: var(--hue); fill-opacity: 0.75; } .band { fill: var(--hue); fill-opacity: 0.16; }
.grid { stroke: var(--line); } .mark { stroke: var(--ink); stroke-dasharray: 2 3; }
"""


def _hues(colours: tuple[str, ...]) -> str:
    return "".join(f".c{number} {{ --hue: {colour}; }}\n" for number, colour in enumerate(colours))


STYLE = f"{_SHEET}{_hues(_LIGHT)}@media (prefers-color-scheme: dark) {{\n{_hues(_DARK)}}}\n"
