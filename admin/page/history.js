// The last hour of the fleet or of a model, as sparklines.
'use strict';

const historyInterval = 10000; // ms between two reads, as long as a step
const minPoints = 12; // that are shown, from the start of the proxy on

// charts are the sparklines: their series, how a value is shown, and the lowest value at the top.
const charts = [
  { id: 'history-rate', series: 'requests_per_second', format: rate, top: 0.1 },
  { id: 'history-ttft50', series: 'ttft_p50_seconds', format: span, top: 0.001 },
  { id: 'history-ttft99', series: 'ttft_p99_seconds', format: span, top: 0.001 },
  { id: 'history-hit', series: 'hit_ratio', format: percent, top: 1 },
  { id: 'history-queued', series: 'queued', format: (n) => whole.format(n), top: 1 },
];

// draw shows a series whose highest value is at most top. Unknown values are gaps; a single point is a dot.
function draw(svg, series, top, label) {
  const width = 100;
  const height = 32;
  svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
  svg.setAttribute('preserveAspectRatio', 'none');
  svg.setAttribute('aria-label', label);
  const step = width / (series.length - 1);
  const y = (v) => (height - 1 - (v / top) * (height - 3)).toFixed(2);
  let line = '';
  let area = '';
  let run = [];
  let last = '';
  const end = () => {
    if (run.length > 0) {
      line += `M${run.join('L')}${run.length === 1 ? 'h0' : ''}`;
      area += `M${run[0].split(' ')[0]} ${height}L${run.join('L')}L${run[run.length - 1].split(' ')[0]} ${height}Z`;
      last = `M${run[run.length - 1]}h0`;
    }
    run = [];
  };
  series.forEach((v, i) => {
    if (v === null) end();
    else run.push(`${(i * step).toFixed(2)} ${y(v)}`);
  });
  end();
  const shapes = { area, line, floor: `M0 ${height}H${width}`, last };
  for (const [name, d] of Object.entries(shapes)) {
    let path = svg.querySelector(`.${name}`);
    if (!path) {
      path = document.createElementNS(svgSpace, 'path');
      path.setAttribute('class', name);
      svg.append(path);
    }
    path.setAttribute('d', d);
  }
}

const minute = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit' });

// drawAxis shows the times of the first, the middle and the last of some points below a chart; none if end is null.
function drawAxis(svg, points, step, end) {
  let axis = svg.nextElementSibling;
  if (!axis) {
    axis = make('p', 'axis', ...[0, 1, 2].map(() => make('time')));
    svg.after(axis);
  }
  [1, 0.5, 0].forEach((share, i) => {
    const at = end && new Date(end.getTime() - share * (points - 1) * step * 1000);
    axis.children[i].dateTime = at ? at.toISOString() : '';
    setText(axis.children[i], at ? (points * step < 600 ? clock : minute).format(at) : '');
  });
}

// showHistory draws all charts; null: nothing is known.
function showHistory(history) {
  const started = history ? history.requests_per_second.findIndex((v) => v !== null) : -1;
  const points = history ? history.requests_per_second.length : 0;
  const first = started < 0 ? points - minPoints : Math.min(started, points - minPoints);
  setText(byId('history-count'), started < 0 ? '' : `in steps of ${history.step_seconds} s, until ${clock.format(new Date(history.end))}`);
  for (const { id, series, format, top } of charts) {
    const shown = history ? history[series].slice(first) : Array(minPoints).fill(null);
    const known = shown.filter((v) => v !== null);
    const highest = Math.max(...known, 0);
    const note = known.length === 0 ? 'nothing yet' : `now ${format(shown[shown.length - 1])}, highest ${format(highest)}`;
    setText(byId(`${id}-note`), note);
    draw(byId(id), shown, Math.max(highest, top), note);
    drawAxis(byId(id), shown.length, history && history.step_seconds, history && new Date(history.end));
  }
}

let historyDue = 0; // as Date.now()
let historyModels = ''; // that can be chosen

async function readHistory() {
  historyDue = Date.now() + historyInterval;
  const model = byId('history-model').value;
  try {
    const response = await fetch(`/api/history?model=${encodeURIComponent(model)}`, { headers: headers(), cache: 'no-store' });
    if (byId('history-model').value !== model) return; // another one was chosen since
    showHistory(response.ok ? await response.json() : null);
  } catch {
    // The page shows that the proxy cannot be reached.
  }
}

// offerModels makes the models those that can be chosen. The chosen one stays.
function offerModels(names) {
  const all = JSON.stringify(names);
  if (all === historyModels) return;
  historyModels = all;
  const select = byId('history-model');
  const chosen = select.value;
  const offered = chosen && !names.includes(chosen) ? [chosen, ...names] : names;
  const options = offered.map((name) => new Option(name, name));
  select.replaceChildren(new Option('All models', ''), ...options);
  select.value = chosen;
}

byId('history-model').addEventListener('change', readHistory);
document.addEventListener('state', ({ detail: state }) => {
  offerModels(state.models.listed.map((m) => m.id));
  if (Date.now() >= historyDue) readHistory();
});
