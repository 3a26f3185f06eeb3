//go:build browser && linux

package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"

	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// choose presses a button of the menu that the selector's button opens.
func (p *tab) choose(opener, action string) {
	p.t.Helper()
	p.do(chromedp.Click(chromedp.CSS(opener)))
	p.until(`document.querySelector('#menu').open`)
	evaluate[any](p, fmt.Sprintf(`[...document.querySelectorAll('#menu button')].find((b) => b.innerText === %q).focus()`, action))
	p.press("\r")
	p.until(`!document.querySelector('#menu').open`)
}

// confirm waits for the question and agrees to it.
func (p *tab) confirm(question, text string) {
	p.t.Helper()
	p.shows("#confirm-title", question)
	p.until(fmt.Sprintf(`document.querySelector('#confirm-text').innerText.includes(%q)`, text))
	p.do(chromedp.Click(chromedp.CSS("#confirm-yes")))
	p.until(`!document.querySelector('#confirm').open`)
}

func TestPageSleepPauseAndReset(t *testing.T) {
	page := openPage(t, startPage(t, "").admin)
	row := page.backendRow("gpu-one")
	page.shows(row+" .source", "config")

	page.choose(row+" .more", "Sleep")
	page.confirm("Sleep gpu-one?", "frees the memory of its GPU")
	page.shows(row+" .state", "asleep")
	page.shows("#progress", "Sleep gpu-one: done")
	page.shows(row+" button", "Wake")
	page.do(chromedp.Click(chromedp.CSS(row + " button")))
	page.shows(row+" .state", "ready")

	page.choose(row+" .more", "Pause") // the other one is ready: nothing is asked
	page.shows(row+" .state", "paused")
	page.shows(row+" button", "Resume")
	page.until(`!document.querySelector('#confirm').open`)
	page.do(chromedp.Click(chromedp.CSS(row + " button")))
	page.shows(row+" .state", "ready")

	page.choose(row+" .more", "Reset prefix cache")
	page.shows("#progress", "Reset prefix cache on gpu-one: done")
	page.shows("#notice", "")
}

func TestPageAdapters(t *testing.T) {
	page := openPage(t, startPage(t, "").admin)
	row := page.backendRow("gpu-one")
	page.choose(row+" .more", "Load adapter")
	page.until(`document.activeElement.name === 'adapter'`)
	page.press("sql")
	page.press("\r") // without a path
	page.until(`document.querySelector('#confirm').open && document.activeElement.name === 'path'`)
	page.press("/adapters/sql")
	page.press("\r")
	page.until(`[...document.querySelectorAll('#models tbody tr')].some((row) => row.innerText.includes('sql') && ` +
		`row.innerText.includes('1 of 1'))`)
	page.choose(row+" .more", "Unload adapter")
	page.press("sql")
	page.confirm("Unload adapter on gpu-one", "LoRA adapter")
	page.shows("#models-count", "1 of 1 ready")
	page.choose(row+" .more", "Unload adapter")
	page.press("sql")
	page.press("\r")
	page.until(`document.querySelector('#notice').innerText.startsWith('Unload adapter on gpu-one failed: ')`)
}

func TestPageActionsOnAllBackends(t *testing.T) {
	proxy := startPage(t, "")
	page := openPage(t, proxy.admin)
	page.shows("#backends-count", "2 of 2 ready")
	page.choose("#all-actions", "Sleep")
	page.shows("#confirm-title", "Sleep all backends?")
	page.press("\r") // Cancel has the focus
	page.until(`!document.querySelector('#confirm').open && document.activeElement.id === 'all-actions'`)
	page.choose("#all-actions", "Sleep")
	page.confirm("Sleep all backends?", "No other backend is ready. New requests will wait")
	page.until(`[...document.querySelectorAll('#backends tbody .state')].every((state) => state.innerText === 'asleep')`)
	page.until(`document.querySelector('#alarm').innerText.startsWith('No backend is ready.')`)
	page.choose("#all-actions", "Wake")
	page.shows("#backends-count", "2 of 2 ready")
	page.choose("#all-actions", "Reset prefix cache")
	page.confirm("Reset prefix cache on all backends?", "forget the cached prefixes")
	page.shows("#progress", "Reset prefix cache on all backends: done")
	page.shows("#notice", "")
}

// TestPageShowsFailureOfOneReplica: the action is carried out on the others.
func TestPageShowsFailureOfOneReplica(t *testing.T) {
	yaml := "backends:\n"
	for i, without := range [][]string{nil, {"/pause"}} {
		url, _ := startSimReplica(t, sim.Config{Engine: engine.Config{KVTokens: 200_000}, Without: without}, "127.0.0.1:0")
		yaml += fmt.Sprintf("- {name: gpu-%d, url: %q}\n", i, url)
	}
	page := openPage(t, startProgram(t, "--config", (&simFleet{}).configFile(t, yaml).path).admin)
	page.shows("#backends-count", "2 of 2 ready")
	page.choose("#all-actions", "Pause")
	page.confirm("Pause all backends?", "No other backend is ready.")
	page.until(`document.querySelector('#notice').innerText.startsWith('Pause all backends failed: gpu-1: ')`)
	page.shows(page.backendRow("gpu-0")+" .state", "paused")
	page.shows(page.backendRow("gpu-1")+" .state", "ready")
}

// startEmptyProgram starts a proxy without backends, which can be added.
func startEmptyProgram(t *testing.T) *program {
	t.Helper()
	config := (&simFleet{}).configFile(t, "state_file: "+filepath.Join(t.TempDir(), "state")+"\nbackends: []\n")
	p := launch(t, exec.Command(binary, "serve", "--config", config.path))
	p.admin = "http://" + p.awaitLog(`msg=listening admin=(\S+)`)
	return p
}

func TestPageEmptyFleet(t *testing.T) {
	proxy := startEmptyProgram(t)
	page := openPage(t, proxy.admin)
	page.until(`document.querySelector('#backends-empty').checkVisibility() && ` +
		`document.querySelector('#backends-empty').innerText.startsWith('There are no replicas yet')`)
	page.shows("#backends-count", "none")
	page.until(`document.title.startsWith('Not ready') && document.querySelector('#all-actions').hidden`)

	url, _ := startSimReplica(t, sim.Config{Engine: engine.Config{KVTokens: 200_000}}, "127.0.0.1:0")
	proxy.add("added", url)
	row := page.backendRow("added")
	page.shows(row+" .source", "registered")
	page.shows(row+" .state", "ready")
	page.until(`document.querySelector('` + row + `').title.includes(', added by 127.0.0.1:')`)

	page.choose(row+" .more", "Remove")
	page.confirm("Remove added?", "No other backend is ready.")
	page.until(`document.querySelectorAll('#backends tbody tr').length === 0`)
	page.shows("#progress", "Remove added: done")
}

// TestPageRanks: the ranks of a server are rows below its own.
func TestPageRanks(t *testing.T) {
	url, _ := startSimReplica(t, sim.Config{Ranks: 4, Engine: engine.Config{KVTokens: 200_000}}, "127.0.0.1:0")
	single, _ := startSimReplica(t, sim.Config{Model: "other", Engine: engine.Config{KVTokens: 200_000}}, "127.0.0.1:0")
	yaml := fmt.Sprintf("backends:\n- {name: eight, url: %q}\n- {name: single, url: %q}\n", url, single)
	page := openPage(t, startProgram(t, "--config", (&simFleet{}).configFile(t, yaml).path).admin)
	page.shows("#backends-count", "5 of 5 ready")
	page.until(`[...document.querySelectorAll('#backends tbody tr')].map((row) => row.cells[0].textContent).sort().join() === 'eight-rank0,` +
		`eight-rank1,eight-rank2,eight-rank3,eight4 ranks,single'`)
	server, rank := page.backendRow("eight"), page.backendRow("eight-rank2")
	page.until(fmt.Sprintf(`(() => { let row = document.querySelector(%q); return [0, 1, 2, 3].every((rank) => { row = `+
		`row.nextElementSibling; return row.cells[0].textContent === 'eight-rank' + rank; }); })()`, server))

	page.do(chromedp.Click(chromedp.CSS(rank + " button"))) // others of its server remain: nothing is asked
	page.shows(rank+" .state", "draining")
	page.shows(server+" .state", "3 of 4 ready")
	page.shows(server+" button", "Drain")
	page.do(chromedp.Click(chromedp.CSS(server + " button")))
	page.confirm("Drain eight?", "No other backend is ready for sim.")
	page.shows(server+" .state", "draining")
	page.until(fmt.Sprintf(`!document.querySelector(%q).checkVisibility()`, rank+" button"))
	page.do(chromedp.Click(chromedp.CSS(server + " button")))
	page.shows(server+" .state", "ready")
	page.shows(rank+" .state", "ready")

	page.choose(server+" .more", "Sleep")
	page.confirm("Sleep eight?", "No other backend is ready for sim.")
	page.shows(server+" .state", "asleep")
	page.shows(rank+" .state", "asleep")
	page.do(chromedp.Click(chromedp.CSS(server + " button")))
	page.shows("#backends-count", "5 of 5 ready")
}

// TestPageRoles: a replica for prefill or decode says so below its name, one for whole requests says nothing.
func TestPageRoles(t *testing.T) {
	fleet := startSimFleet(t, 3, 200_000)
	ranks, _ := startSimReplica(t, sim.Config{Ranks: 2, Engine: engine.Config{KVTokens: 200_000}}, "127.0.0.1:0")
	yaml := fmt.Sprintf("backends:\n- {name: prefills, url: %q, role: prefill}\n- {name: decodes, url: %q, role: decode}\n- {name: whole, "+
		"url: %q}\n- {name: two, url: %q, role: decode}\n",
		fleet.urls[0], fleet.urls[1], fleet.urls[2], ranks)
	page := openPage(t, startProgram(t, "--config", fleet.configFile(t, yaml).path).admin)
	page.shows("#backends-count", "5 of 5 ready")
	page.until(`[...document.querySelectorAll('#backends tbody tr')].map((row) => row.cells[0].textContent).sort().join(';') === ` +
		`'decodesdecode;prefillsprefill;two-rank0;two-rank1;twodecode, 2 ranks;whole'`)
	page.until(`[...document.querySelectorAll('#backends tbody tr')].every((row) => row.title.endsWith(', vLLM 0.32.0'))`)
}

func TestPageShowsSourcesAndProblems(t *testing.T) {
	fleet := startSimFleet(t, 2, 200_000)
	file := filepath.Join(t.TempDir(), "backends")
	if err := os.WriteFile(file, []byte(fleet.urls[1]+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	yaml := fmt.Sprintf("dns: {server: \"127.0.0.1:9\", interval: 100ms}\nbackends_file: %s\nbackends: [{name: first, url: %q}, {name: "+
		"named, url: \"dns://vllm.invalid:8000\"}]\n", file, fleet.urls[0])
	config := fleet.configFile(t, yaml)
	proxy := startProgram(t, "--config", config.path)
	page := openPage(t, proxy.admin)
	page.shows("#backends-count", "2 of 2 ready")
	page.shows(page.backendRow("first")+" .source", "config")
	page.shows(page.backendRow(strings.TrimPrefix(fleet.urls[1], "http://"))+" .source", "file")
	page.until(`document.querySelector('#problems').innerText.startsWith('The last lookup of vllm.invalid:8000 failed: ')`)
	config.write(yaml + "no_such_setting: true\n")
	page.until(`document.querySelector('#problems').innerText.startsWith('The last reload failed, and the configuration before stays in ` +
		`use: ') && document.querySelector('#problems').innerText.includes('no_such_setting')`)
	config.write(strings.Replace(yaml, `, {name: named, url: "dns://vllm.invalid:8000"}`, "", 1))
	page.until(`document.querySelector('#problems').hidden`)
}

// TestPageRemovesName: the addresses of a name in DNS were added together, and are removed together.
func TestPageRemovesName(t *testing.T) {
	first, _ := startSimReplica(t, sim.Config{Engine: engine.Config{KVTokens: 200_000}}, "127.0.0.1:0")
	port := first[strings.LastIndex(first, ":")+1:]
	startSimReplica(t, sim.Config{Engine: engine.Config{KVTokens: 200_000}}, "127.0.0.2:"+port)
	nameServer, addresses := startNameServer(t)
	addresses.Store(&[]string{"127.0.0.1", "127.0.0.2"})
	config := fmt.Sprintf("dns: {server: %q}\nbackends: [%q]\n", nameServer, startSimFleet(t, 1, 200_000).urls[0])
	proxy := startProgram(t, "--config", (&simFleet{}).configFile(t, config).path)
	page := openPage(t, proxy.admin)
	proxy.add("pool", "http://replicas.test:"+port)
	row := page.backendRow("pool@127.0.0.2")
	page.shows(row+" .source", "DNS name")
	page.shows("#backends-count", "3 of 3 ready")
	page.choose(row+" .more", "Remove")
	page.confirm("Remove pool?", "These are removed: pool@127.0.0.1, pool@127.0.0.2.")
	page.until(`document.querySelectorAll('#backends tbody tr').length === 1`)
	page.shows("#notice", "")
}
