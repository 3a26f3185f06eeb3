// What keys and models have used, and what the caches have saved.
'use strict';

const usageInterval = 10000; // ms between two reads
const maxUsageRows = 100;
const day = new Intl.DateTimeFormat('en-GB', { day: 'numeric', month: 'short', year: 'numeric', hour: '2-digit', minute: '2-digit' });

// usageFrom returns from when on usage is shown, as the API takes it: '' for all of it.
function usageFrom(period, now) {
  const date = now.toISOString();
  return { today: date.slice(0, 10), month: `${date.slice(0, 7)}-01` }[period] || '';
}

// estimatedShare says how much of a number is an estimate.
function estimatedShare(estimated, all) {
  return estimated > 0 ? `${percent(Math.min(estimated / all, 1))} estimated` : '';
}

function savedText(c) {
  if (c.prompt_tokens === 0) return '';
  const share = percent(c.cached_tokens / c.prompt_tokens);
  return `Of ${whole.format(c.prompt_tokens)} prompt tokens ${share} were cached. Their prefill would have taken about ${span(c.saved_prefill_seconds)} more.`;
}

const showUsage = rows('usage', (row, first) => {
  cell(row, '', 'main wide', first.name);
  const requests = textWithNote(cell(row, 'Requests', 'right'));
  const inFlight = cell(row, 'In flight', 'right');
  const prompt = textWithNote(cell(row, 'Prompt tokens', 'right'));
  const cached = textWithNote(cell(row, 'Cached', 'right'));
  const output = cell(row, 'Output tokens', 'right');
  const queue = cell(row, 'Queue', 'right');
  const saved = cell(row, 'Prefill saved', 'right');
  return (r) => {
    requests(whole.format(r.requests), r.errors ? `${whole.format(r.errors)} failed` : '');
    setText(inFlight, r.inFlight === undefined ? none : whole.format(r.inFlight));
    prompt(whole.format(r.prompt_tokens), estimatedShare(r.estimated_tokens, r.prompt_tokens + r.output_tokens));
    cached(r.prompt_tokens ? percent(r.cached_tokens / r.prompt_tokens) : none, estimatedShare(r.estimated_cached_tokens, r.cached_tokens));
    setText(output, whole.format(r.output_tokens));
    setText(queue, span(r.queue_seconds));
    setText(saved, span(r.saved_prefill_seconds));
  };
});

let usageDue = 0; // as Date.now()

async function readUsage() {
  usageDue = Date.now() + usageInterval;
  const by = byId('usage-by').value;
  const period = byId('usage-period').value;
  const query = new URLSearchParams({ by, from: usageFrom(period, new Date()) });
  try {
    const response = await fetch(`/api/usage?${query}`, { headers: headers(), cache: 'no-store' });
    const why = response.ok ? '' : await problem(response);
    const usage = response.ok ? await response.json() : null;
    if (by !== byId('usage-by').value || period !== byId('usage-period').value) return; // another read was begun since
    const unsaved = usage && usage.unsaved ? `usage.file cannot be written, so what is new is in memory: ${usage.unsaved}` : why;
    byId('usage-error').hidden = !unsaved;
    setText(byId('usage-error'), unsaved);
    if (!usage) return;
    if (usage.since_start && period !== 'all') { // the page says "since start", whenever that was
      byId('usage-period').value = 'all';
      readUsage();
      return;
    }
    const list = usage.rows.map((r) => ({ ...r, name: r[by] || `without a ${by}`, inFlight: by === 'key' ? usage.in_flight[r.key] : undefined }));
    const shown = list.slice(0, maxUsageRows);
    const since = usage.since_start ? 'since start' : usage.since && `since ${day.format(new Date(usage.since))}`;
    const all = list.length > shown.length ? `the first ${shown.length} of ${list.length}` : '';
    setText(byId('usage-count'), [since, all].filter(Boolean).join(', '));
    byId('usage-period').hidden = usage.since_start;
    setText(byId('usage-saved'), savedText(usage.total));
    byId('usage-saved').hidden = usage.total.prompt_tokens === 0;
    showUsage(shown, (r) => `${by} ${r.name}`);
  } catch {
    // The page shows that the proxy cannot be reached.
  }
}

for (const id of ['usage-by', 'usage-period']) byId(id).addEventListener('change', readUsage);
document.addEventListener('state', () => {
  if (Date.now() >= usageDue) readUsage();
});
