// Values under the pointer, and a closer look: drag a rectangle in a figure, double-click for all of it.
for (const svg of document.querySelectorAll("svg[data-hover]")) {
  const data = JSON.parse(svg.dataset.hover), whole = svg.getAttribute("viewBox");
  const place = event => new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const nearest = (values, at) =>
    values.reduce((best, value, i) => Math.abs(value - at) < Math.abs(values[best] - at) ? i : best, 0);
  let tip, from;
  const told = ({x, y}) => {
    if (data.lines) {
      const first = data.lines[0], at = nearest(first.x, x);
      return [`step ${first.step[at]}`].concat(data.lines.map(line => {
        const i = nearest(line.x, first.x[at]);
        return `${line.name}: ${line.value[i] ?? "not finite"}` + (line.step[i] === first.step[at] ? "" : ` (step ${line.step[i]})`);
      })).join("\n");
    }
    const [left, top, right, bottom] = data.box;
    const row = Math.floor((y - top) / (bottom - top) * data.rows.length);
    const column = Math.floor((x - left) / (right - left) * data.columns.length);
    if (!(row in data.rows && column in data.columns)) return "";
    return `${data.rows[row]}, ${data.columns[column]}: ${data.values[row][column] ?? "nothing"}`;
  };
  svg.addEventListener("pointermove", event => {
    tip ??= svg.parentElement.appendChild(document.createElement("output"));
    tip.textContent = told(place(event));
    const box = svg.parentElement.getBoundingClientRect(), x = event.clientX - box.left;
    tip.style.cssText = `top: ${event.clientY - box.top + 14}px; ${x < box.width / 2 ? "left" : "right"}: ` +
      `${x < box.width / 2 ? x + 12 : box.width - x + 12}px; display: ${tip.textContent ? "block" : "none"}`;
  });
  svg.addEventListener("pointerleave", () => { tip?.remove(); tip = undefined; });
  svg.addEventListener("pointerdown", event => { from = place(event); });
  svg.addEventListener("pointerup", event => {
    const to = place(event), ratio = svg.clientHeight / svg.clientWidth;
    const width = from ? Math.max(Math.abs(to.x - from.x), Math.abs(to.y - from.y) / ratio) : 0;
    if (width > 8) {
      svg.style.aspectRatio = `${svg.clientWidth} / ${svg.clientHeight}`;
      const x = (from.x + to.x - width) / 2, y = (from.y + to.y - width * ratio) / 2;
      svg.setAttribute("viewBox", `${x} ${y} ${width} ${width * ratio}`);
    }
    from = undefined;
  });
  svg.addEventListener("dblclick", () => svg.setAttribute("viewBox", whole));
}
