//go:build browser

package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"

	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// tab is the live page in a browser.
type tab struct {
	t   *testing.T
	ctx context.Context
}

// openPage opens it. A test fails whose page complains of anything but a response
// that it did not get: that the proxy is away is what some are about.
func openPage(t *testing.T, url string) *tab {
	t.Helper()
	p, close := openTab(t)
	messages := chromedp.Console(p.ctx)
	var listening sync.WaitGroup
	listening.Go(func() {
		for m, err := range messages {
			if err == nil && m.Source != "network" && p.ctx.Err() == nil {
				t.Errorf("the page says: %v", m)
			}
		}
	})
	t.Cleanup(func() { close(); listening.Wait() })
	p.do(chromedp.EmulateViewport(1280, 1000), chromedp.Navigate(url))
	return p
}

// openTab opens an empty page in a browser of its own.
func openTab(t *testing.T) (p *tab, close func()) {
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.NoSandbox) // which root has not
	ctx, end := chromedp.NewExecAllocator(t.Context(), options...)
	t.Cleanup(end)
	ctx, close = chromedp.NewContext(ctx)
	p = &tab{t, ctx}
	evaluate[bool](p, "true") // starts the browser, which ends with the context of its first action
	return p, close
}

func (p *tab) do(steps ...chromedp.Action[chromedp.Void]) {
	p.t.Helper()
	ctx, end := context.WithTimeout(p.ctx, time.Minute)
	defer end()
	if err := chromedp.Do(ctx, steps...); err != nil {
		p.t.Fatalf("%v; the page shows:\n%s", err, evaluate[string](p, "document.body.innerText"))
	}
}

func evaluate[T any](p *tab, script string) T {
	p.t.Helper()
	got, err := chromedp.Run(p.ctx, chromedp.Evaluate[T](script))
	if err != nil {
		p.t.Fatalf("%s: %v", script, err)
	}
	return got
}

// until waits for a condition in JavaScript.
func (p *tab) until(condition string) {
	p.t.Helper()
	for end := time.Now().Add(time.Minute); !evaluate[bool](p, condition); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			p.t.Fatalf("never: %s; the page shows:\n%s", condition, evaluate[string](p, "document.body.innerText"))
		}
	}
}

// shows waits until an element's text is that.
func (p *tab) shows(selector, text string) {
	p.t.Helper()
	p.until(fmt.Sprintf("document.querySelector(%q)?.innerText.trim() === %q", selector, text))
}

// press presses a key on what has the focus.
func (p *tab) press(key string) { p.do(chromedp.KeyEvent(key)) }

func (p *tab) focus(selector string) { p.do(chromedp.Focus(chromedp.CSS(selector))) }

// prefers makes the browser ask for a colour scheme.
func (p *tab) prefers(scheme string) {
	p.do(chromedp.Func(func(ctx context.Context, _ *chromedp.Target) error {
		_, err := chromedp.Call(ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
			Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
		})
		return err
	}))
}

// startPage starts a proxy in front of two slow replicas with long names.
func startPage(t *testing.T, yaml string) *program {
	t.Helper()
	p, _ := startPageWithReplicas(t, yaml)
	return p
}

// startPageWithReplicas is startPage for tests that disturb the replicas, at the URLs.
func startPageWithReplicas(t *testing.T, yaml string) (p *program, replicas []string) {
	t.Helper()
	yaml += "\nbackends:\n"
	for _, name := range []string{"gpu-one", "gpu-two-whose-name-is-longer-than-a-name-should-be-by-any-standard"} {
		address, _ := startSimReplica(t, sim.Config{Engine: engine.Config{KVTokens: 200_000}}, "127.0.0.1:0")
		yaml += fmt.Sprintf("- {name: %s, url: %q}\n", name, address)
		replicas = append(replicas, address)
	}
	return startProgram(t, "--config", (&simFleet{}).configFile(t, yaml).path), replicas
}

// disturb gives a simulated replica a fault.
func disturb(t *testing.T, replica, fault string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, replica+"/sim/fault", strings.NewReader(fault))
	if err != nil {
		t.Fatal(err)
	}
	req.Close = true // the replica closes idle connections, one of which might be used at that moment
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		t.Fatalf("the fault %s has status %d", fault, resp.StatusCode)
	}
}

func TestPageShowsStalledBackend(t *testing.T) {
	proxy, replicas := startPageWithReplicas(t, "")
	page := openPage(t, proxy.admin)
	proxy.askAtLength("stalled-later")
	page.shows("#requests tbody tr .state", "responding")
	page.shows("#backends-count", "2 of 2 ready")
	at := 0
	if !evaluate[bool](page, `document.querySelector('#requests tbody tr').innerText.includes('gpu-one')`) {
		at = 1
	}
	row := fmt.Sprintf("#backends tbody tr:nth-child(%d)", at+1)
	disturb(t, replicas[at], `{"kind":"freeze"}`)
	page.shows(row+" .state", "stalled")
	page.until(fmt.Sprintf(`document.querySelector('%s .why .sub').innerText.match(/^since \d\d:\d\d:\d\d \(.*\): it has requests and `+
		`makes no progress$/) !== null`, row))
	page.shows("#backends-count", "1 of 2 ready")
	page.shows("#requests tbody tr .state", "stalled")
	page.shows("#in-flight-note", "0 responding, 1 stalled")
	page.shows("#models-count", "1 of 1 ready")
	page.shows("#models tbody tr td:nth-child(3)", "1 of 2")
	page.until(`document.querySelector('#alarm').hidden`)
	disturb(t, replicas[at], `{"kind":"clear"}`)
	page.shows(row+" .state", "ready")
	page.shows("#requests tbody tr .state", "responding")
}

func TestPageWithNoReadyBackend(t *testing.T) {
	proxy, replicas := startPageWithReplicas(t, "health: {interval: 200ms, down_interval: 200ms}")
	page := openPage(t, proxy.admin)
	page.shows("#models-count", "1 of 1 ready")
	for _, r := range replicas {
		disturb(t, r, `{"kind":"status","status":503,"everything":true}`)
	}
	page.until(`!document.querySelector('#alarm').hidden && document.querySelector('#alarm').innerText.startsWith('No backend is ready.')`)
	page.shows("#backends-count", "0 of 2 ready")
	page.shows("#backends tbody tr:first-child .state", "down")
	page.until(`document.querySelector('#backends tbody tr .why .sub').innerText.match(/^since .*: \/health returned 503$/) !== null`)
	page.shows("#models-count", "0 of 1 ready")
	page.until(`document.querySelector('#models tbody tr').innerText.includes('gpu-one is down, gpu-two') && ` +
		`document.title.startsWith('Not ready')`)
	for _, hard := range evaluate[[]string](page, contrasts) {
		t.Errorf("hard to read: %s", hard)
	}
	for _, r := range replicas {
		disturb(t, r, `{"kind":"clear"}`)
	}
	page.until(`document.querySelector('#alarm').hidden && !document.title.startsWith('Not ready')`)
	page.shows("#backends-count", "2 of 2 ready")
}

func TestPageConfirmsDrainOfLastBackend(t *testing.T) {
	proxy := startPage(t, "")
	page := openPage(t, proxy.admin)
	page.shows("#backends-count", "2 of 2 ready")
	const first, second = "#backends tbody tr:nth-child(1)", "#backends tbody tr:nth-child(2)"
	page.do(chromedp.Click(chromedp.CSS(first + " button")))
	page.shows(first+" .state", "draining")
	page.until(`document.querySelector('` + first + ` .why .sub').innerText.endsWith('being drained by an operator')`)
	page.until(`!document.querySelector('#confirm').open`)

	page.focus(second + " button")
	page.press("\r")
	page.until(`document.querySelector('#confirm').open && document.activeElement.id === 'confirm-no'`)
	page.until(`document.querySelector('#confirm-text').innerText.includes('No other backend is ready. New requests will wait')`)
	page.press("\r")
	page.until(`!document.querySelector('#confirm').open`)
	page.shows(second+" .state", "ready")
	if n := metricSum(t, proxy.admin, "warmroute_backend_draining"); n != 1 {
		t.Errorf("%v backends are draining", n)
	}
	page.do(chromedp.Click(chromedp.CSS(second + " button")))
	page.until(`document.querySelector('#confirm').open`)
	page.do(chromedp.Click(chromedp.CSS("#confirm-yes")))
	page.shows(second+" .state", "draining")
	page.until(`document.querySelector('#alarm').innerText.startsWith('No backend is ready.')`)
	page.until(`document.querySelector('#models tbody tr').innerText.includes('gpu-one is draining')`)
	page.do(chromedp.Click(chromedp.CSS(second + " button")))
	page.shows(second+" .state", "ready")
	page.until(`document.querySelector('#alarm').hidden`)
}

// askAtLength sends a request whose response takes minutes, and returns its outcome.
func (p *program) askAtLength(id string) <-chan string {
	got := make(chan string, 1)
	go func() {
		body := fmt.Sprintf(`{"model":"sim","stream":true,"ignore_eos":true,"max_tokens":20000,"messages":[{"role":"user","content":%q}]}`,
			words(400))
		req, _ := http.NewRequestWithContext(p.t.Context(), http.MethodPost, p.url+"/v1/chat/completions", strings.NewReader(body))
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Request-Id", id)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			got <- err.Error()
			return
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		got <- string(text)
	}()
	return got
}

func TestPageOperations(t *testing.T) {
	proxy := startPage(t, "")
	page := openPage(t, proxy.admin)
	page.shows("#connection", "Live")
	page.until(`document.querySelectorAll('#backends tbody tr').length === 2`)
	page.shows("#backends tbody tr:first-child .state", "ready")
	page.shows("#backends-count", "2 of 2 ready")
	page.shows("#requests-empty", "Nothing is in flight.")

	first, second := proxy.askAtLength("the-first"), proxy.askAtLength("the-second")
	page.until(`document.querySelectorAll('#requests tbody tr').length === 2`)
	page.shows("#requests tbody tr:first-child .state", "responding")
	page.shows("#in-flight", "2")
	page.until(`document.querySelectorAll('#decisions tbody tr').length === 2`)

	// A request is cancelled with the keyboard alone; the focus goes on to the other's button.
	page.until(`[...document.querySelectorAll('#requests tbody tr')].some((row) => row.innerText.includes('the-first'))`)
	evaluate[any](page, `[...document.querySelectorAll('#requests tbody tr')].find((row) => `+
		`row.innerText.includes('the-first')).querySelector('button').focus()`)
	page.press("\r")
	page.until(`document.activeElement.innerText === 'Confirm'`)
	page.press("\r")
	if got := <-first; !strings.Contains(got, `"code":"cancelled"`) {
		t.Errorf("the client got %.300s", got)
	}
	page.until(`document.querySelectorAll('#requests tbody tr').length === 1`)
	page.until(`document.activeElement === document.querySelector('#requests tbody button')`)
	if metricSum(t, proxy.admin, "warmroute_cancelled_requests_total") != 1 {
		t.Error("it is not counted")
	}
	page.do(chromedp.Click(chromedp.CSS("#requests tbody button")))
	page.shows("#requests tbody button", "Confirm")
	page.do(chromedp.Click(chromedp.CSS("#requests tbody button")))
	if got := <-second; !strings.Contains(got, `"code":"cancelled"`) {
		t.Errorf("the second client got %.300s", got)
	}
	page.shows("#requests-empty", "Nothing is in flight.")
	page.until(`document.querySelector('#ttft').innerText !== '–'`)

	// A backend is drained, and drained no more, and the button keeps the focus.
	page.focus("#backends tbody button")
	page.press("\r")
	page.shows("#backends tbody tr:first-child .state", "draining")
	page.shows("#backends tbody button", "Undrain")
	page.until(`document.activeElement === document.querySelector('#backends tbody button')`)
	if n := metricSum(t, proxy.admin, "warmroute_backend_draining"); n != 1 {
		t.Errorf("%v backends are draining", n)
	}
	page.press("\r")
	page.shows("#backends tbody tr:first-child .state", "ready")
	page.shows("#notice", "")
}

func TestPagePause(t *testing.T) {
	proxy := startPage(t, "")
	page := openPage(t, proxy.admin)
	page.shows("#connection", "Live")
	page.do(chromedp.Click(chromedp.CSS("#pause")))
	page.shows("#connection", "Paused")
	proxy.askAtLength("while-paused")
	page.until(`latest.requests.all === 1`)
	if shown := evaluate[string](page, `document.querySelector('#in-flight').innerText`); shown != "0" {
		t.Errorf("%s are shown in flight", shown)
	}
	page.do(chromedp.Click(chromedp.CSS("#pause")))
	page.shows("#in-flight", "1")
	page.shows("#connection", "Live")
}

// doorway is an address that leads to whichever proxy runs now: where one
// restarts, its address stays.
type doorway struct {
	url string
	to  atomic.Pointer[string] // host and port
}

func openDoorway(t *testing.T) *doorway {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	d := &doorway{url: "http://" + l.Addr().String()}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			in, err := l.Accept()
			if err != nil {
				return
			}
			go d.pass(in)
		}
	}()
	return d
}

func (d *doorway) pass(in net.Conn) {
	defer in.Close()
	out, err := net.Dial("tcp", *d.to.Load())
	if err != nil {
		return
	}
	defer out.Close()
	go func() {
		io.Copy(out, in)
		out.Close()
	}()
	io.Copy(in, out)
}

func (d *doorway) leadsTo(t *testing.T, p *program) {
	t.Helper()
	u, err := url.Parse(p.admin)
	if err != nil {
		t.Fatal(err)
	}
	d.to.Store(&u.Host)
}

func TestPageReconnects(t *testing.T) {
	door := openDoorway(t)
	before := startPage(t, "")
	door.leadsTo(t, before)
	page := openPage(t, door.url)
	page.shows("#connection", "Live")
	before.askAtLength("of-the-first-process")
	page.shows("#in-flight", "1")
	before.signal(os.Kill)
	page.shows("#connection", "Reconnecting")
	page.until(`document.body.dataset.stale !== undefined`)
	after := startPage(t, "")
	door.leadsTo(t, after)
	page.shows("#connection", "Live")
	page.shows("#in-flight", "0")
	page.until(`document.body.dataset.stale === undefined`)
	after.signal(os.Interrupt) // what is sent to the page is no reason to stay
	if status := after.exit(); status != 0 {
		t.Errorf("ended with %d", status)
	}
	page.shows("#connection", "Reconnecting")
}

func TestPageAdminToken(t *testing.T) {
	const token = "a-token-that-operators-have"
	proxy := startPage(t, "admin_token: "+token)
	page := openPage(t, proxy.admin)
	page.shows("#connection", "Locked")
	page.until(`document.activeElement.id === 'token-input' && document.querySelector('#main').hidden`)
	page.do(chromedp.SendKeys(chromedp.CSS("#token-input"), "another"))
	page.press("\r")
	page.until(`document.querySelector('#token-why').innerText.startsWith('That is not')`)
	page.do(chromedp.SendKeys(chromedp.CSS("#token-input"), token))
	page.press("\r")
	page.shows("#connection", "Live")
	page.until(`document.querySelector('#token').hidden && document.querySelectorAll('#backends tbody tr').length === 2`)
	page.do(chromedp.Click(chromedp.CSS("#backends tbody button")))
	page.shows("#backends tbody tr:first-child .state", "draining")
	page.do(chromedp.Reload())
	page.shows("#connection", "Live") // the tab has it still
	if evaluate[bool](page, `location.href.includes('token') || document.documentElement.outerHTML.includes('`+token+`')`) {
		t.Error("the token is shown")
	}
}

// contrasts lists texts that are hard to read: below 4.5 to 1 against what is
// behind them.
const contrasts = `(() => {
  const parse = (c) => { const n = c.match(/[\d.]+/g).map(Number); return n.length === 3 ? [...n, 1] : n; };
  const over = (top, below) => [0, 1, 2].map((i) => top[i] * top[3] + below[i] * (1 - top[3])).concat(1);
  const behind = (e) => { const c = e ? parse(getComputedStyle(e).backgroundColor) : [255, 255, 255, 1]; return c[3] === 1 ? c : over(c, behind(e.parentElement)); };
  const light = (c) => { const [r, g, b] = c.slice(0, 3).map((v) => v / 255).map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  return [...document.querySelectorAll('body *')].filter((e) => e.checkVisibility() && [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())).map((e) => {
    const back = behind(e), [a, b] = [light(over(parse(getComputedStyle(e).color), back)), light(back)];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.className + ' ' + e.textContent.slice(0, 40)];
  }).filter(([ratio]) => ratio < 4.5).map(([ratio, what]) => ratio.toFixed(2) + ' ' + what);
})()`

// backendRow returns the selector of the row of a backend, or of a server with ranks, once it is shown.
func (p *tab) backendRow(name string) string {
	p.t.Helper()
	find := fmt.Sprintf(`[...document.querySelectorAll('#backends tbody tr')].findIndex((row) => row.cells[0].firstChild.data === %q || `+
		`row.cells[0].textContent.startsWith(%q)) + 1`, name, name)
	p.until(find + " > 0")
	return fmt.Sprintf("#backends tbody tr:nth-child(%d)", evaluate[int](p, find))
}

// add adds a replica and waits until it is ready.
func (p *program) add(name, url string) {
	p.t.Helper()
	resp, err := http.Post(p.admin+"/api/backends?wait=1m", "application/json",
		strings.NewReader(fmt.Sprintf(`{"name":%q,"url":%q}`, name, url)))
	if err != nil {
		p.t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusCreated {
		p.t.Fatalf("adding %s: status %d", name, resp.StatusCode)
	}
}

// cutOff lists what is wider than its place.
const cutOff = `[...document.querySelectorAll('.scroll, .panel, .tile, dialog, dialog button, td button')].filter((e) => ` +
	`e.checkVisibility() && e.scrollWidth > e.clientWidth + 1).map((e) => (e.id || e.className) + ' ' + e.innerText.slice(0, 30))`

func TestPageLayout(t *testing.T) {
	proxy := startPage(t, "")
	page := openPage(t, proxy.admin)
	ranks, _ := startSimReplica(t, sim.Config{Ranks: 2, Engine: engine.Config{KVTokens: 200_000}}, "127.0.0.1:0")
	proxy.add("added", ranks)
	page.backendRow("added-rank1")
	proxy.askAtLength(strings.Repeat("x", 128))
	page.until(`document.querySelectorAll('#requests tbody tr').length === 1 && document.querySelectorAll('#decisions tbody tr').length === 1`)
	grounds := map[string]bool{}
	for _, scheme := range []string{"light", "dark"} {
		page.prefers(scheme)
		grounds[evaluate[string](page, `getComputedStyle(document.body).backgroundColor`)] = true
		for _, hard := range evaluate[[]string](page, contrasts) {
			t.Errorf("%s: hard to read: %s", scheme, hard)
		}
		for _, width := range []int64{320, 400, 600, 700, 900, 1024, 1080, 1280, 1920} {
			page.do(chromedp.EmulateViewport(width, 800))
			if wide := evaluate[int64](page, `document.documentElement.scrollWidth`); wide > width {
				t.Errorf("%s: at %d the page is %d wide", scheme, width, wide)
			}
			for _, what := range evaluate[[]string](page, cutOff) {
				t.Errorf("%s: at %d something is cut off or scrolls sideways: %s", scheme, width, what)
			}
			evaluate[any](page, `openMenu('added')`)
			for _, what := range append(evaluate[[]string](page, cutOff), evaluate[[]string](page, contrasts)...) {
				t.Errorf("%s: at %d in the menu something is cut off or hard to read: %s", scheme, width, what)
			}
			evaluate[any](page, `byId('menu').close()`)
		}
		page.do(chromedp.EmulateViewport(1280, 1000))
	}
	if len(grounds) != 2 {
		t.Errorf("light and dark have one ground: %v", grounds)
	}
}
