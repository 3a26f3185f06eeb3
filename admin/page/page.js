// The live page: receives the proxy's state once a second and shows it. Text is inserted
// as text only. Rows are updated in place, which keeps the focus and the scroll position.
'use strict';

const byId = (id) => document.getElementById(id);
const svgSpace = 'http://www.w3.org/2000/svg';
const tokenKey = 'warmroute-admin-token';
const eventTimeout = 5000; // ms without an event until the connection is considered broken
const minReconnectDelay = 500; // ms
const maxReconnectDelay = 5000; // ms
const progressTimeout = 6000; // ms for which the result of an action is shown

// --- formatting ---

const none = '–';
const whole = new Intl.NumberFormat('en');
const percent = (share) => (share === null || share === undefined ? none : `${Math.round(100 * share)} %`);

function span(seconds) {
  if (seconds === null || seconds === undefined) return none;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 99.95) return `${seconds.toFixed(1)} s`;
  return minutes(seconds);
}

// redisText says with how many proxies this one shares what it knows.
function redisText(redis) {
  if (!redis) return '';
  const since = span((Date.now() - Date.parse(redis.since)) / 1000);
  if (!redis.connected) return `Redis not connected for ${since}`;
  return redis.proxies === 1 ? 'Redis: no other proxy' : `${redis.proxies} proxies`;
}

// minutes formats a duration of a minute or more.
function minutes(seconds) {
  const n = Math.floor(seconds / 60);
  if (n < 60) return `${n} min ${String(Math.floor(seconds % 60)).padStart(2, '0')} s`;
  if (n < 60 * 48) return `${Math.floor(n / 60)} h ${String(n % 60).padStart(2, '0')} min`;
  return `${Math.floor(n / 1440)} days`;
}

const clock = new Intl.DateTimeFormat('en-GB', { hour: '2-digit', minute: '2-digit', second: '2-digit' });

const rate = (perSecond) => `${perSecond.toFixed(perSecond < 99.95 ? 1 : 0)}/s`;

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function setData(element, name, value) {
  if (element.dataset[name] !== value) element.dataset[name] = value;
}

// --- elements ---

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

function cell(row, label, className, ...children) {
  const td = make('td', className, ...children);
  if (label) td.dataset.label = label;
  row.append(td);
  return td;
}

// stateIn adds a coloured dot with a word, because colour alone is not accessible.
function stateIn(td) {
  const word = make('span', 'word');
  const dot = make('span', 'dot');
  dot.setAttribute('aria-hidden', 'true');
  const box = make('span', 'state', dot, word);
  td.append(box);
  const why = make('span', 'sub');
  td.append(why);
  return (tone, text, cause = '') => {
    setData(box, 'tone', tone);
    setText(word, text);
    setText(why, cause);
    why.hidden = !cause;
  };
}

// gaugeIn adds a small bar with its value.
function gaugeIn(td) {
  const fill = make('span');
  const bar = make('span', 'bar', fill);
  bar.setAttribute('aria-hidden', 'true');
  const value = make('span', 'value');
  td.append(make('span', 'gauge', bar, value));
  return (share, text, tone = '') => {
    const width = `${(100 * Math.min(Math.max(share || 0, 0), 1)).toFixed(1)}%`;
    if (fill.style.width !== width) fill.style.width = width;
    setData(bar, 'tone', tone);
    setText(value, text);
  };
}

// rows returns a function that updates a table by key. Remaining rows keep their order,
// so none is moved.
function rows(table, build) {
  const body = byId(table).tBodies[0];
  const empty = byId(`${table}-empty`);
  const title = byId(`${table}-title`);
  const known = new Map();
  const remove = (key, row) => {
    known.delete(key);
    if (row.element.contains(document.activeElement)) {
      const next = row.element.nextElementSibling || row.element.previousElementSibling;
      const button = next && next.querySelector('button');
      (button || title).focus({ preventScroll: true });
    }
    row.element.remove();
  };
  return (list, keyOf) => {
    const keys = new Set(list.map(keyOf));
    for (const [key, row] of known) if (!keys.has(key)) remove(key, row);
    let at = body.firstElementChild;
    for (const item of list) {
      const key = keyOf(item);
      let row = known.get(key);
      if (!row) {
        const element = document.createElement('tr');
        row = { element, update: build(element, item) };
        known.set(key, row);
      }
      if (row.element === at) at = at.nextElementSibling;
      else body.insertBefore(row.element, at);
      row.update(item);
    }
    empty.hidden = list.length > 0;
    byId(table).classList.toggle('none', list.length === 0);
  };
}

// --- operations ---

let token = sessionStorage.getItem(tokenKey) || '';

const headers = () => (token ? { Authorization: `Bearer ${token}` } : {});

function notice(text) {
  byId('notice-bar').hidden = !text;
  setText(byId('notice'), text);
}

byId('notice-close').addEventListener('click', () => notice(''));

// problem returns why a request has failed, or with which result for each backend.
async function problem(response) {
  try {
    const body = await response.json();
    const results = body.results || [];
    if (results.length === 0) return body.error.message;
    return results.filter((r) => !r.ok).map((r) => (results.length > 1 ? `${r.backend}: ${r.error}` : r.error)).join('\n');
  } catch {
    return `the proxy responded with status ${response.status}`;
  }
}

const ongoing = new Set(); // descriptions of the requests that have no response yet
let progressTimer = 0;

// showProgress shows what is ongoing, or else for some seconds what has been done.
function showProgress(done) {
  clearTimeout(progressTimer);
  setText(byId('progress'), [...ongoing].map((what) => `${what} …`).join(', ') || done);
  progressTimer = setTimeout(() => { if (ongoing.size === 0) setText(byId('progress'), ''); }, progressTimeout);
}

// send has the proxy do something, and shows the result.
async function send(what, method, path, body) {
  notice('');
  ongoing.add(what);
  showProgress('');
  let done = '';
  try {
    const response = await fetch(path, {
      method, headers: { ...headers(), 'Content-Type': 'application/json' }, cache: 'no-store', body: body && JSON.stringify(body),
    });
    if (response.ok) done = `${what}: done`;
    else notice(`${what} failed: ${await problem(response)}`);
    const state = await fetch('/api/state', { headers: headers(), cache: 'no-store' });
    if (state.ok) {
      show(await state.json());
      if (latest) render(latest); // show the result even if paused
    }
  } catch {
    notice(`${what} failed: the proxy cannot be reached.`);
  }
  ongoing.delete(what);
  showProgress(done);
}

// confirmed asks the operator, for the values of the fields as well. It resolves to the values, or null
// if the operator disagrees.
function confirmed(title, text, yes, fields = {}) {
  const dialog = byId('confirm');
  setText(byId('confirm-title'), title);
  setText(byId('confirm-text'), text);
  setText(byId('confirm-yes'), yes);
  byId('confirm-yes').className = Object.keys(fields).length > 0 ? 'primary' : 'danger';
  const inputs = Object.entries(fields).map(([name, label]) => {
    const input = make('input');
    Object.assign(input, { name, required: true, autocomplete: 'off', spellcheck: false });
    return [input, make('label', '', label, input)];
  });
  byId('confirm-fields').replaceChildren(...inputs.map(([, label]) => label));
  dialog.returnValue = '';
  dialog.showModal();
  (inputs.length > 0 ? inputs[0][0] : byId('confirm-no')).focus();
  return new Promise((done) => {
    dialog.addEventListener('close', () => {
      done(dialog.returnValue === 'yes' ? Object.fromEntries(inputs.map(([input]) => [input.name, input.value.trim()])) : null);
    }, { once: true });
  });
}
byId('confirm-form').addEventListener('submit', (event) => {
  event.preventDefault();
  byId('confirm').close('yes');
});
byId('confirm-no').addEventListener('click', () => byId('confirm').close('no'));

// --- actions on backends ---

// Those that stop a backend ask for confirmation if no other is ready.
const finish = 'Requests in flight finish first; if that takes more than a minute, nothing is done.';
const actions = {
  'drain': { label: 'Drain', text: 'Requests in flight finish, and no new ones are sent until the backend is undrained.', stops: true },
  'undrain': { label: 'Undrain', text: 'New requests are sent again.' },
  'sleep': { label: 'Sleep', text: `${finish} Then the engine frees the memory of its GPU and loses the cached prefixes.`, stops: true, asks: true },
  'wake': { label: 'Wake', text: 'The engine loads its memory again, and new requests are sent.' },
  'pause': { label: 'Pause', text: `${finish} Then the engine stops, but keeps its memory.`, stops: true },
  'resume': { label: 'Resume', text: 'The engine goes on, and new requests are sent.' },
  'reset-cache': { label: 'Reset prefix cache', on: true, text: 'The replica and this proxy forget the cached prefixes.', asksForAll: true },
  'load-adapter': { label: 'Load adapter', on: true, text: 'The replica loads a LoRA adapter from a path on its machine.', fields: { adapter: 'Name', path: 'Path' } },
  'unload-adapter': { label: 'Unload adapter', on: true, text: 'The replica unloads a LoRA adapter.', fields: { adapter: 'Name' } },
  'remove': { label: 'Remove', text: 'Requests in flight finish. Then the backend is removed, until it is added again.' },
};

// chosenBackends returns those of a name: a backend, a server with its ranks, or all for ''.
const chosenBackends = (name) => latest.backends.filter((b) => !name || b.name === name || b.server === name);

// availableActions returns the names of the actions on some backends, the most likely one first.
function availableActions(name, list) {
  const states = new Set(list.map((b) => b.state));
  const state = states.size === 1 ? list[0].state : '';
  const drain = list.every((b) => b.drained) ? 'undrain' : 'drain';
  const engine = { asleep: ['wake'], paused: ['resume'], ready: ['sleep', 'pause'] }[state] || ['sleep', 'wake', 'pause', 'resume'];
  const first = engine.length === 1 && drain === 'drain' ? [...engine, drain] : [drain, ...engine];
  const all = [...first, 'reset-cache', 'load-adapter', 'unload-adapter'];
  if (!name) return all.filter((action) => action !== drain);
  return list.some((b) => b.registration) ? [...all, 'remove'] : all;
}

// lastReadyWarning warns if no other backend than those in list is ready, or none for a model.
function lastReadyWarning(list) {
  const ready = latest.backends.filter((b) => b.state === 'ready');
  const others = ready.filter((b) => !list.includes(b));
  if (others.length === ready.length) return '';
  const remains = (b) => others.some((other) => b.server && other.server === b.server);
  const models = new Set(list.filter((b) => !remains(b)).flatMap((b) => b.last_ready_for || []));
  if (others.length > 0 && models.size === 0) return '';
  const which = others.length > 0 ? ` for ${[...models].join(', ')}` : '';
  return `No other backend is ready${which}. New requests will wait, and fail if none is ready within routing.queue.none_ready_timeout.`;
}

// perform carries out an action, for which it asks if that is necessary.
async function perform(action, name) {
  if (action === 'remove') {
    removeRegistration(chosenBackends(name).find((b) => b.registration));
    return;
  }
  const { label, on, text, stops, asks, asksForAll, fields } = actions[action];
  const what = `${label}${on ? ' on' : ''} ${name || 'all backends'}`;
  const warning = stops ? lastReadyWarning(chosenBackends(name)) : '';
  let body;
  if (warning || asks || fields || asksForAll && !name) {
    body = await confirmed(fields ? what : `${what}?`, warning ? `${text} ${warning}` : text, label, fields);
    if (!body) return;
  }
  send(what, 'POST', `/api/backends/${name ? `${encodeURIComponent(name)}/` : ''}${action}`, fields && body);
}

// removeRegistration removes what was added with a backend: also other addresses of its name in DNS.
async function removeRegistration(b) {
  if (!b) return;
  const { name } = b.registration;
  const list = latest.backends.filter((other) => other.registration && other.registration.name === name);
  const names = new Set(list.map((other) => other.server || other.name));
  const text = [actions.remove.text, names.size > 1 ? `These are removed: ${[...names].join(', ')}.` : '', lastReadyWarning(list)];
  if (await confirmed(`Remove ${name}?`, text.filter(Boolean).join(' '), 'Remove')) {
    send(`Remove ${name}`, 'DELETE', `/api/backends/${encodeURIComponent(name)}`);
  }
}

// openMenu shows all actions on a backend, on a server with its ranks, or on all.
function openMenu(name) {
  const list = chosenBackends(name);
  if (list.length === 0) return;
  setText(byId('menu-title'), name || 'All backends');
  setText(byId('menu-text'), name ? origin(list[0]) : 'An action that fails for one is carried out on the others.');
  byId('menu-actions').replaceChildren(...availableActions(name, list).map((action) => {
    const button = make('button', '', actions[action].label);
    button.type = 'button';
    button.addEventListener('click', () => {
      byId('menu').close();
      perform(action, name);
    });
    return make('li', '', button, make('span', '', actions[action].text));
  }));
  byId('menu').showModal();
}
byId('menu-close').addEventListener('click', () => byId('menu').close());
byId('all-actions').addEventListener('click', () => openMenu(''));

// cancelButton returns a button that has to be pressed twice, because rows move.
function cancelButton(request) {
  const button = make('button', '', 'Cancel');
  button.type = 'button';
  const name = `request ${request.request_id}`;
  let timer = 0;
  const say = (text, armed) => {
    button.textContent = text;
    button.classList.toggle('armed', armed);
    button.setAttribute('aria-label', `${text}: ${armed ? 'cancel ' : ''}${name}`);
  };
  const disarm = () => {
    clearTimeout(timer);
    timer = 0;
    say('Cancel', false);
  };
  disarm();
  button.addEventListener('blur', () => { if (timer) disarm(); });
  button.addEventListener('click', () => {
    if (!timer) {
      say('Confirm', true);
      timer = setTimeout(disarm, 4000);
      return;
    }
    disarm();
    send(`Cancel ${name}`, 'POST', `/api/requests/${encodeURIComponent(request.handle)}/cancel`);
  });
  return button;
}

// --- tables ---

const sources = { configuration: 'config', file: 'file', registration: 'registered' };

// origin describes where a backend is, what names it and what it runs.
function origin(b) {
  const at = b.address ? `${b.url} at ${b.address}` : b.url;
  const from = b.registration ? `added by ${b.registration.by}` : `from ${b.source === 'file' ? 'backends_file' : `the ${b.source}`}`;
  return b.version ? `${at}, ${from}, vLLM ${b.version}` : `${at}, ${from}`;
}

// backendItems returns the rows of the table: backends, and servers, each before its ranks.
function backendItems(list) {
  const servers = new Map();
  const items = [];
  for (const b of list) {
    if (!b.server) {
      items.push({ key: b.name, name: b.name, b });
      continue;
    }
    if (!servers.has(b.server)) {
      servers.set(b.server, { key: `${b.server}/ranks`, name: b.server, ranks: [] });
      items.push(servers.get(b.server));
    }
    servers.get(b.server).ranks.push(b);
  }
  return items.flatMap((item) => [item, ...(item.ranks || []).map((b) => ({ key: b.name, name: b.name, b }))]);
}

// actionButtons adds a button for the most likely action and, unless of a rank, one that opens the menu.
function actionButtons(td, name, isRank) {
  const button = make('button');
  button.type = 'button';
  const box = make('span', 'buttons', button);
  if (!isRank) {
    const more = make('button', 'more', '⋯');
    more.type = 'button';
    more.setAttribute('aria-haspopup', 'dialog');
    more.setAttribute('aria-label', `All actions on ${name}`);
    more.addEventListener('click', () => openMenu(name));
    box.append(more);
  }
  td.append(box);
  let action = '';
  button.addEventListener('click', () => perform(action, name));
  return (list) => {
    action = isRank ? (list[0].drained ? 'undrain' : 'drain') : availableActions(name, list)[0];
    button.hidden = isRank && Boolean(list[0].server_drained);
    setText(button, actions[action].label);
    button.setAttribute('aria-label', `${actions[action].label} ${name}`);
  };
}

// sumOf adds up what backends report; it is unknown if none does.
function sumOf(list, value) {
  const known = list.map(value).filter((n) => n !== null);
  return known.length === 0 ? none : whole.format(known.reduce((a, b) => a + b, 0));
}

const showBackends = rows('backends', (row, { name, b: first, ranks }) => {
  const isRank = Boolean(first && first.server);
  const notes = make('span', 'sub');
  const title = isRank ? [make('span', 'unseen', `${first.server}-`), `rank${first.rank}`] : [name];
  cell(row, '', 'main', ...title, notes);
  row.className = isRank ? 'rank' : '';
  const source = cell(row, 'Source', 'source');
  const state = stateIn(cell(row, 'State', 'why'));
  const inFlight = cell(row, 'In flight', 'right');
  const running = cell(row, 'Running', 'right');
  const waiting = cell(row, 'Waiting', 'right');
  const kvCell = cell(row, 'KV cache', '');
  const indexCell = cell(row, 'Index', '');
  const hit = cell(row, 'Hit ratio', 'right');
  const perSecond = cell(row, 'Rate', 'right');
  const showActions = actionButtons(cell(row, '', 'action'), name, isRank);
  const showCounts = (list) => {
    if (row.title !== origin(list[0])) row.title = origin(list[0]);
    if (!isRank) setText(source, list[0].address ? 'DNS name' : sources[list[0].source]);
    setText(inFlight, sumOf(list, (b) => b.in_flight));
    setText(running, sumOf(list, (b) => b.running));
    setText(waiting, sumOf(list, (b) => b.waiting));
    setText(perSecond, rate(list.reduce((sum, b) => sum + b.requests_per_second, 0)));
    showActions(list);
  };
  const showNotes = (...list) => setText(notes, list.filter(Boolean).join(', '));
  if (ranks) {
    return (item) => {
      state(...serverState(item.ranks));
      showNotes(item.ranks[0].role, `${item.ranks.length} ranks`);
      showCounts(item.ranks);
    };
  }
  const kv = gaugeIn(kvCell);
  const index = gaugeIn(indexCell);
  const confirmed = make('span', 'sub');
  indexCell.append(confirmed);
  return ({ b }) => {
    const [tone, word, why] = backendState(b);
    state(tone, word, isRank && haveSameState(chosenBackends(b.server)) ? '' : why);
    showCounts([b]);
    showNotes(!isRank && b.role, b.aborted_responses && `${whole.format(b.aborted_responses)} aborted`);
    const usage = b.kv_usage;
    kv(usage, percent(usage), usage > 0.95 ? 'bad' : usage > 0.85 ? 'warn' : '');
    const fill = b.index_capacity_blocks ? b.index_blocks / b.index_capacity_blocks : null;
    index(fill, percent(fill));
    setText(confirmed, b.kv_events ? `${whole.format(b.kv_events.confirmed_blocks)} confirmed` : '');
    confirmed.title = b.kv_events && !b.kv_events.complete ? 'the KV events do not cover everything that the replica holds' : '';
    setText(hit, percent(b.hit_ratio));
  };
});

// haveSameState reports whether backends have one state for one reason.
const haveSameState = (list) => list.every((b) => b.state === list[0].state && b.reason === list[0].reason && b.breaker === list[0].breaker);

// serverState returns the tone, the word and the cause of the state of a server with ranks.
function serverState(ranks) {
  if (haveSameState(ranks)) return backendState(ranks[0]);
  const ready = ranks.filter((b) => b.state === 'ready').length;
  return [ready === 0 ? 'bad' : 'warn', `${ready} of ${ranks.length} ready`];
}

const states = {
  ready: ['good', 'ready'],
  starting: ['calm', 'starting'],
  down: ['bad', 'down'],
  stalled: ['bad', 'stalled'],
  asleep: ['warn', 'asleep'],
  paused: ['warn', 'paused'],
  stopping: ['warn', 'shutting down'],
  draining: ['warn', 'draining'],
};

// backendState returns the tone, the word and the cause of a backend's state.
function backendState(b) {
  const [tone, word] = states[b.state] || ['', b.state];
  if (b.state !== 'ready') return [tone, word, cause(b)];
  if (b.breaker === 'open') return ['bad', 'failing', 'its last requests failed; other backends are preferred'];
  if (b.breaker === 'half-open') return ['warn', 'recovering', 'its last requests failed; one request at a time probes it'];
  if (b.reason) return ['warn', 'slow', b.reason];
  return [tone, word, b.missing_endpoints ? `does not serve ${b.missing_endpoints.join(', ')}` : ''];
}

// cause returns since when and why something has its state.
function cause(what) {
  const reason = what.reason ? `: ${what.reason}` : '';
  return what.since ? `since ${clock.format(new Date(what.since))} (${age(what.since)})${reason}` : what.reason || '';
}

// age uses the proxy's clock, which may differ from the browser's.
function age(at) {
  const seconds = Math.max(0, Math.floor((new Date(latest.now) - new Date(at)) / 1000));
  return seconds < 60 ? `${seconds} s` : minutes(seconds);
}

const showModels = rows('models', (row, first) => {
  cell(row, '', 'main', first.id);
  const state = stateIn(cell(row, 'State', 'why'));
  const ready = cell(row, 'Ready backends', 'right');
  const perSecond = cell(row, 'Rate', 'right');
  const ttft50 = cell(row, 'TTFT p50', 'right');
  const ttft99 = cell(row, 'TTFT p99', 'right');
  const hit = cell(row, 'Hit ratio', 'right');
  const queued = cell(row, 'Queued', 'right');
  return (m) => {
    if (m.ready > 0) state('good', 'ready');
    else state('bad', 'not ready', cause(m));
    setText(ready, `${m.ready} of ${m.backends}`);
    const recent = m.recent || {};
    setText(perSecond, m.recent ? rate(recent.requests_per_second) : none);
    setText(ttft50, span(recent.ttft_p50_seconds));
    setText(ttft99, span(recent.ttft_p99_seconds));
    setText(hit, percent(recent.hit_ratio));
    setText(queued, whole.format(m.queued));
  };
});

// showProblems shows why the backends may not be those that the configuration and DNS name now.
function showProblems({ reload_error: reloadError, failing_names: names }) {
  const lines = names.map((n) => {
    if (!n.error) return `${n.name} has ${n.addresses + n.omitted} addresses, of which ${n.addresses} are used: raise dns.max_addresses.`;
    return `The last lookup of ${n.name} failed${n.addresses > 0 ? `; its ${n.addresses} known addresses stay in use` : ''}: ${n.error}`;
  });
  if (reloadError) lines.unshift(`The last reload failed, and the configuration before stays in use: ${reloadError}`);
  byId('problems').hidden = lines.length === 0;
  setText(byId('problems'), lines.join('\n'));
}

// showAlarm shows why requests cannot be served, and returns that text.
function showAlarm(state) {
  const all = state.backends;
  const wait = 'Requests wait, and fail after routing.queue.none_ready_timeout.';
  let text = '';
  if (all.length > 0 && all.every((b) => b.state !== 'ready')) {
    text = `No backend is ready. ${wait}`;
  } else if (state.models.unready > 0) {
    const names = state.models.listed.filter((m) => m.ready === 0).map((m) => m.id);
    const shown = names.slice(0, 3).join(', ');
    const more = state.models.unready - Math.min(names.length, 3);
    text = `No backend is ready for ${shown}${more > 0 ? ` and ${more} more models` : ''}. ${wait}`;
  }
  byId('alarm').hidden = !text;
  setText(byId('alarm'), text);
  return text;
}

const phases = {
  'upload': ['', 'upload'],
  'queued': ['warn', 'queued'],
  'first token': ['calm', 'waiting for first token'],
  'responding': ['good', 'responding'],
};

function predicted(r) {
  return r.prompt_tokens ? `${whole.format(r.predicted_tokens)} of ${whole.format(r.prompt_tokens)}` : none;
}

const showRequests = rows('requests', (row, first) => {
  const id = cell(row, '', 'main wide', make('span', 'mono', first.request_id));
  const sub = make('span', 'sub');
  id.append(sub);
  const phase = stateIn(cell(row, 'Phase', ''));
  const model = cell(row, 'Model', '');
  const backend = cell(row, 'Backend', '');
  const gauge = gaugeIn(cell(row, 'Predicted tokens', 'double'));
  const attempts = cell(row, 'Attempts', 'right');
  const age = cell(row, 'Age', 'right');
  cell(row, '', 'action', cancelButton(first));
  return (r) => {
    setText(sub, r.key ? `${r.endpoint}, key ${r.key}` : r.endpoint);
    if (r.stalled) phase('bad', 'stalled');
    else phase(...phases[r.phase]);
    setText(model, r.model || none);
    setText(backend, r.backend || none);
    gauge(r.prompt_tokens ? r.predicted_tokens / r.prompt_tokens : 0, predicted(r));
    setText(attempts, String(r.attempts));
    setText(age, span(r.age_seconds));
  };
});

const showQueue = rows('queue', (row, first) => {
  cell(row, '', 'main wide', make('span', 'mono', first.request_id));
  const model = cell(row, 'Model', '');
  const age = cell(row, 'Age', 'right');
  return (r) => {
    setText(model, r.model || none);
    setText(age, span(r.age_seconds));
  };
});

const showDecisions = rows('decisions', (row, d) => {
  const time = make('time', '', clock.format(new Date(d.at)));
  time.dateTime = d.at;
  cell(row, 'Time', 'short', time);
  const where = cell(row, 'Backend', 'short', d.backend);
  where.title = `${d.backend}, model ${d.model}`;
  const why = cell(row, 'Why', 'wide', make('span', 'tag', d.reason), d.sentence);
  why.title = `request ${d.request_id}`;
  cell(row, 'Predicted', 'right', predicted(d));
  return () => {};
});

// --- the state ---

let paused = false;
let latest = null;
let runs = ''; // the version that is shown

function show(state) {
  if (runs && state.version !== runs) {
    location.reload(); // this page belongs to another version
    return;
  }
  runs = state.version;
  latest = state;
  if (!paused) render(state);
}

function render(state) {
  const alarm = showAlarm(state);
  showProblems(state.fleet);
  document.title = `${alarm || state.backends.length === 0 ? 'Not ready' : `${state.requests.all} in flight`} · warmroute`;
  setText(byId('version'), state.version);
  setText(byId('policy'), `policy ${state.policy}`);
  setText(byId('uptime'), `up ${span(state.uptime_seconds)}`);
  setText(byId('redis'), redisText(state.redis));
  const responding = state.requests.oldest.filter((r) => r.phase === 'responding' && !r.stalled).length;
  const stalled = state.requests.oldest.filter((r) => r.stalled).length;
  setText(byId('in-flight'), whole.format(state.requests.all));
  setText(byId('in-flight-note'), state.requests.oldest.length < state.requests.all ? '' : `${responding} responding${stalled ? `, ${stalled} stalled` : ''}`);
  setText(byId('queued'), whole.format(state.queue.requests));
  setText(byId('queued-note'), state.queue.oldest_seconds === null ? 'queue is empty' : `oldest ${span(state.queue.oldest_seconds)}`);
  setText(byId('rate'), rate(state.recent.requests_per_second));
  setText(byId('rate-note'), state.recent.failed_ratio ? `last 30 s, errors ${percent(state.recent.failed_ratio)}` : 'over the last 30 s');
  setText(byId('ttft'), span(state.recent.ttft_p50_seconds));
  setText(byId('ttft-note'), state.recent.ttft_p99_seconds === null ? 'no stream in the last 30 s' : `p99 ${span(state.recent.ttft_p99_seconds)}`);
  setText(byId('hit'), percent(state.recent.hit_ratio));
  const elsewhere = state.recent.elsewhere_ratio;
  setText(byId('hit-note'), elsewhere === null ? 'no response in the last 30 s' : elsewhere < 0.005 ? 'of prompt tokens' : `of prompt tokens, ${percent(elsewhere)} on another backend`);
  const ready = state.backends.filter((b) => b.state === 'ready').length;
  const failing = state.backends.filter((b) => b.state === 'ready' && b.breaker === 'open').length;
  byId('all-actions').hidden = state.backends.length === 0;
  setText(byId('backends-count'), state.backends.length === 0 ? 'none' : `${ready} of ${state.backends.length} ready${failing ? `, ${failing} failing` : ''}`);
  setData(byId('backends-count'), 'tone', ready === 0 ? 'bad' : failing || ready < state.backends.length ? 'warn' : 'good');
  showBackends(backendItems(state.backends), (item) => item.key);
  const models = state.models;
  setText(byId('models-count'), `${models.all - models.unready} of ${models.all} ready${models.listed.length < models.all ? `, ${models.listed.length} listed` : ''}`);
  setData(byId('models-count'), 'tone', models.unready > 0 ? 'bad' : 'good');
  showModels(models.listed, (m) => m.id);
  const listed = state.requests.oldest.length;
  setText(byId('requests-count'), listed < state.requests.all ? `the ${listed} oldest of ${whole.format(state.requests.all)}` : String(listed));
  showRequests(state.requests.oldest, (r) => r.handle);
  const listedQueued = state.queue.first.length;
  setText(byId('queue-count'), listedQueued < state.queue.requests ? `the ${listedQueued} oldest of ${whole.format(state.queue.requests)}` : String(state.queue.requests));
  showQueue(state.queue.first, (r) => r.handle);
  showDecisions(state.decisions, (d) => `${state.version} ${d.number} ${d.at}`);
  byId('main').hidden = false;
  document.dispatchEvent(new CustomEvent('state', { detail: state })); // to the other scripts
}

function connection(state, word) {
  setData(byId('connection'), 'state', paused && state === 'live' ? 'paused' : state);
  setText(byId('connection-word'), paused && state === 'live' ? 'Paused' : word);
  if (state === 'live') delete document.body.dataset.stale;
  else document.body.dataset.stale = '';
}

byId('pause').addEventListener('click', () => {
  paused = !paused;
  byId('pause').setAttribute('aria-pressed', String(paused));
  if (byId('connection').dataset.state === 'live' || byId('connection').dataset.state === 'paused') connection('live', 'Live');
  if (!paused && latest) render(latest);
});

// --- the connection ---

const sleep = (ms) => new Promise((done) => setTimeout(done, ms));

// askToken waits until the operator enters a token.
function askToken(why) {
  sessionStorage.removeItem(tokenKey);
  token = '';
  connection('waiting', 'Locked');
  byId('main').hidden = true;
  byId('token').hidden = false;
  if (why) setText(byId('token-why'), why);
  byId('token-input').value = '';
  byId('token-input').focus();
  return new Promise((done) => {
    byId('token').addEventListener('submit', (event) => {
      event.preventDefault();
      token = byId('token-input').value.trim();
      sessionStorage.setItem(tokenKey, token);
      byId('token-input').value = '';
      byId('token').hidden = true;
      connection('waiting', 'Connecting');
      done();
    }, { once: true });
  });
}

// events calls show with each state until the stream ends. It throws if the connection breaks.
async function events(response, alive) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    alive();
    const parts = (rest + value).split('\n\n');
    rest = parts.pop();
    for (const part of parts) {
      const data = part.startsWith('event: state\n') && part.slice(part.indexOf('data: ') + 6);
      if (data) {
        show(JSON.parse(data));
        connection('live', 'Live');
      }
    }
  }
}

// receive keeps one connection until it ends. It returns the delay before the next one.
async function receive(wait) {
  const stop = new AbortController();
  let timer = 0;
  let received = false;
  const alive = () => {
    clearTimeout(timer);
    timer = setTimeout(() => stop.abort(), eventTimeout);
  };
  const ours = () => { received = true; alive(); };
  alive();
  try {
    const response = await fetch('/api/events', { headers: headers(), cache: 'no-store', signal: stop.signal });
    if (response.status === 401) {
      clearTimeout(timer);
      await askToken(token ? 'That is not this proxy’s admin_token.' : '');
      return 0;
    }
    if (!response.ok) {
      notice(`Reading the proxy’s state failed: ${await problem(response)}`);
    } else {
      notice('');
      await events(response, ours);
    }
  } catch {
    // The proxy is unreachable or silent: the page shows that and reconnects.
  } finally {
    clearTimeout(timer);
    stop.abort();
  }
  connection('lost', 'Reconnecting');
  return received ? minReconnectDelay : Math.min(2 * wait, maxReconnectDelay);
}

async function run() {
  if (document.body.dataset.token === 'wanted' && !token) await askToken('');
  for (let wait = minReconnectDelay; ; ) {
    const next = await receive(wait);
    await sleep(next);
    wait = next || minReconnectDelay;
  }
}

byId('replay-command').textContent = `warmroute replay --from ${location.origin}`;
run();
