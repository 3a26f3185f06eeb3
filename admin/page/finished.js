// The finished requests, which the proxy searches.
'use strict';

const finishedInterval = 10000; // ms between two reads of the newest

function statusTone(status) {
  if (status < 400) return 'good';
  return status < 500 ? 'warn' : 'bad';
}

// textWithNote returns a function that sets the text of a cell and what is below it.
function textWithNote(td) {
  const text = make('span');
  const note = make('span', 'sub');
  td.append(text, note);
  return (value, below) => {
    setText(text, value);
    setText(note, below);
    note.hidden = !below;
  };
}

// cachedText says how many prompt tokens were predicted to be cached, and how many were.
function cachedText(r) {
  if (!r.backend) return '';
  const cached = r.cached_tokens === null ? '' : `, ${whole.format(r.cached_tokens)} cached`;
  return `${whole.format(r.predicted_tokens)} predicted${cached}`;
}

const showFinished = rows('finished', (row, r) => {
  const by = [r.endpoint, r.key ? `key ${r.key}` : r.client].filter(Boolean).join(', ');
  cell(row, '', 'main wide', make('span', 'mono', r.request_id), make('span', 'sub', by));
  const time = make('time', '', clock.format(new Date(r.at)));
  time.dateTime = r.at;
  cell(row, 'Ended', '', time);
  const disconnected = r.disconnected ? `disconnected: ${r.disconnected.replaceAll('_', ' ')}` : '';
  stateIn(cell(row, 'Status', ''))(statusTone(r.status), String(r.status), r.cancelled ? 'cancelled' : disconnected);
  cell(row, 'Model', '', r.model || none);
  const failures = r.failures.map((f) => `${f.backend} failed: ${f.reason}`);
  const backend = r.prefill_backend ? `${r.prefill_backend} → ${r.backend}` : r.backend;
  textWithNote(cell(row, 'Backend', ''))(backend || none, [r.reason, ...failures].filter(Boolean).join('; '));
  textWithNote(cell(row, 'Prompt tokens', 'right'))(r.backend ? whole.format(r.prompt_tokens) : none, cachedText(r));
  cell(row, 'Queue', 'right', r.queue_seconds ? span(r.queue_seconds) : none);
  cell(row, 'TTFT', 'right', span(r.ttft_seconds));
  textWithNote(cell(row, 'Output', 'right'))(span(r.output_seconds), r.output_tokens ? `${whole.format(r.output_tokens)} tokens` : '');
  textWithNote(cell(row, 'Total', 'right'))(span(r.duration_seconds), r.attempts > 1 ? `${r.attempts} attempts` : '');
  return () => {};
});

let finishedDue = 0; // as Date.now()
let search = 0; // number of the latest

async function readFinished() {
  finishedDue = Date.now() + finishedInterval;
  search += 1;
  const number = search;
  const query = new URLSearchParams();
  for (const [name, value] of new FormData(byId('finished-form'))) if (value.trim()) query.set(name, value.trim());
  try {
    const response = await fetch(`/api/requests?${query}`, { headers: headers(), cache: 'no-store' });
    const why = response.ok ? '' : await problem(response);
    const found = response.ok ? await response.json() : null;
    if (number !== search) return; // another search was begun since
    byId('finished-error').hidden = !why;
    setText(byId('finished-error'), why);
    if (!found) return;
    const kept = found.oldest ? `, of those since ${clock.format(new Date(found.oldest))}` : '';
    const shown = found.requests.length < found.found ? `the newest ${found.requests.length} of ` : '';
    setText(byId('finished-empty'), found.finished ? 'No finished request is known that matches.' : 'No request has ended yet.');
    setText(byId('finished-count'), `${shown}${whole.format(found.found)}${kept}`);
    showFinished(found.requests, (r) => `${latest.version} ${r.number} ${r.at}`);
  } catch {
    // The page shows that the proxy cannot be reached.
  }
}

byId('finished-form').addEventListener('submit', (event) => {
  event.preventDefault();
  readFinished();
});
byId('finished-form').addEventListener('reset', () => setTimeout(readFinished)); // once the fields are empty
document.addEventListener('state', () => {
  if (Date.now() >= finishedDue) readFinished();
});
