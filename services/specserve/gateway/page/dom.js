// Elements without a framework. Text goes in as text, never as markup.

export const byId = (id) => document.getElementById(id);

/** Make an element: its class, its text or children, its attributes. */
export function make(tag, className = "", content = "", attributes = {}) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (typeof content === "string") element.textContent = content;
  else element.append(...content);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** Fill a description list. */
export function describe(list, pairs) {
  list.replaceChildren(...pairs.map(([term, value]) =>
    make("div", "", [make("dt", "", term), make("dd", "", String(value))])));
}

/** Fill the body of a table; a cell is text or an element. */
export function fillTable(table, rows) {
  table.tBodies[0].replaceChildren(...rows.map((cells) => make("tr", "", cells.map((cell) =>
    make("td", "", cell instanceof Node ? [cell] : String(cell))))));
}

/** Fill a chart with columns, {value, title}; those above 0 are coloured. */
export function drawColumns(chart, columns) {
  const most = Math.max(1, ...columns.map(({ value }) => value));
  chart.replaceChildren(...columns.map(({ value, title }) => {
    const column = make("div", value > 0 ? "step drafted" : "step", "", { title });
    column.style.height = `${(100 * value) / most}%`;
    return column;
  }));
}

/** Long ids by their beginning; the whole one on demand. */
export const brief = (id) => (id.length > 20 ? `${id.slice(0, 20)}…` : id);

export const percent = (share) => `${(100 * share).toFixed(0)} %`;
export const milliseconds = (seconds) => `${(1e3 * seconds).toFixed(1)} ms`;
