package e2e

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// monitored is a proxy that serves, asked for something of every kind.
type monitored struct {
	*program
	fleet  *simFleet
	key    string
	client *http.Client
}

// redisAbsent are settings with a Redis where nothing listens.
const redisAbsent = "redis: {url: \"redis://127.0.0.1:1\"}\n"

func startMonitored(t *testing.T, settings string) *monitored {
	fleet := &simFleet{}
	for range 2 {
		url, _ := startSimReplica(t, sim.Config{
			Engine: engine.Config{KVTokens: 100_000, Speed: 20}, KVEvents: sim.KVEventsConfig{Endpoint: "0"},
		}, "127.0.0.1:0")
		fleet.urls = append(fleet.urls, url)
	}
	m := &monitored{fleet: fleet, key: "the-key-of-the-team-that-asks", client: &http.Client{Transport: &http.Transport{}}}
	file := t.TempDir() + "/keys"
	if err := os.WriteFile(file, []byte("team "+m.key+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	spans := startCollector(t, "http/protobuf") // or no span would be counted
	names := "models: {names: [{name: coder, model: sim}]}\n"
	m.program = startProgramWithEnv(t, spans.env, "--config", fleet.configFile(t, "keys_file: "+file+"\n"+names+settings).path)
	t.Cleanup(m.client.CloseIdleConnections)
	return m
}

// ask sends a chat and returns the status and the answer as it comes.
func (m *monitored) ask(key, prompt, more string) *http.Response {
	m.t.Helper()
	body := fmt.Sprintf(`{"model":"sim","max_tokens":20,"messages":[{"role":"user","content":%q}]%s}`, prompt, more)
	return m.post(m.url+"/v1/chat/completions", key, body)
}

func (m *monitored) post(url, key, body string) *http.Response {
	m.t.Helper()
	req, err := http.NewRequestWithContext(m.t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		m.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+key)
	resp, err := m.client.Do(req)
	if err != nil {
		m.t.Fatal(err)
	}
	return resp
}

// status reads the answer to its end, however that is, and returns its status.
func status(resp *http.Response) int {
	defer resp.Body.Close()
	io.Copy(io.Discard, resp.Body)
	return resp.StatusCode
}

const streams = `,"stream":true,"stream_options":{"include_usage":true}`

// chat sends prompts that each replica, at least the one, sees often.
func (m *monitored) chat() {
	m.t.Helper()
	for i := range 6 {
		for _, more := range []string{streams, ""} {
			if code := status(m.ask(m.key, strings.Repeat(fmt.Sprint("system prompt ", i, " "), 200), more)); code != http.StatusOK {
				m.t.Fatalf("a chat is answered with %d", code)
			}
		}
	}
	named := `{"model":"coder","max_tokens":2,"messages":[{"role":"user","content":"a"}]}`
	if code := status(m.post(m.url+"/v1/chat/completions", m.key, named)); code != http.StatusOK {
		m.t.Fatalf("a chat that asks for a name is answered with %d", code)
	}
}

// mishap makes happen what goes wrong now and then.
func (m *monitored) mishap() {
	m.t.Helper()
	status(m.ask("no-such-key-at-all", "x", ""))
	resp := m.ask(m.key, "long", streams+`,"ignore_eos":true,"max_completion_tokens":5000`)
	if _, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil {
		m.t.Fatal(err)
	}
	resp.Body.Close() // the client leaves
	for _, fault := range []string{`{"kind":"status","status":500,"requests":1}`, `{"kind":"die","chunks":3,"requests":1}`} {
		for _, replica := range m.fleet.urls {
			status(m.post(replica+"/sim/fault", "", fault))
		}
		status(m.ask(m.key, words(300), streams)) // is made elsewhere, or breaks off
	}
	for _, replica := range m.fleet.urls {
		status(m.post(replica+"/sim/fault", "", `{"kind":"clear"}`))
	}
	m.drain("drain")
	held := make(chan int)
	go func() { held <- status(m.ask(m.key, "held", "")) }()
	m.eventually("a request is held", func() bool { return metricSum(m.t, m.admin, "warmroute_queue_requests") > 0 })
	m.drain("undrain")
	if code := <-held; code != http.StatusOK {
		m.t.Errorf("the one that was held is answered with %d", code)
	}
}

func (m *monitored) drain(verb string) {
	m.t.Helper()
	for _, replica := range m.fleet.urls {
		if code := status(m.post(m.admin+"/api/backends/"+strings.TrimPrefix(replica, "http://")+"/"+verb, "", "{}")); code != http.StatusOK {
			m.t.Fatalf("%s is answered with %d", verb, code)
		}
	}
}

// families are the metrics that the proxy has of its own.
func (m *monitored) families() map[string]*dto.MetricFamily {
	m.t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	all, err := parser.TextToMetricFamilies(strings.NewReader(m.exposition()))
	if err != nil {
		m.t.Fatal(err)
	}
	for name := range all {
		if !strings.HasPrefix(name, "warmroute_") {
			delete(all, name)
		}
	}
	return all
}

// board is what the tests read of a Grafana dashboard.
type board struct {
	UID    string `json:"uid"`
	Panels []struct {
		ID                       int
		Type, Title, Description string
		GridPos                  struct{ X, Y, W, H int }
		FieldConfig              struct {
			Defaults struct{ Unit string }
		}
		Datasource struct{ UID string }
		Targets    []struct{ Expr string }
	}
	Templating struct {
		List []struct{ Name, Type, Definition string }
	}
}

func readBoard(t *testing.T) (b board) {
	t.Helper()
	text, err := os.ReadFile("scripts/monitoring/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &b); err != nil {
		t.Fatal(err)
	}
	return b
}

// queries are all that the board and the alerts ask for, each with who does.
func queries(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, p := range readBoard(t).Panels {
		for i, target := range p.Targets {
			all[fmt.Sprintf("panel %q, query %c", p.Title, 'A'+i)] = target.Expr
		}
	}
	for _, r := range readAlerts(t) {
		all["alert "+r.Alert] = r.Expr
	}
	return all
}

func TestGrafanaDashboard(t *testing.T) {
	b := readBoard(t)
	ids, taken := map[int]bool{}, map[[2]int]string{}
	for _, p := range b.Panels {
		if ids[p.ID] {
			t.Errorf("two panels have the id %d", p.ID)
		}
		ids[p.ID] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" || x >= 24 {
					t.Fatalf("%q lies over %q, or beyond the edge", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.Title == "" || p.Description == "" || p.FieldConfig.Defaults.Unit == "" || len(p.Targets) == 0 ||
			p.Datasource.UID != "${datasource}" {
			t.Errorf("panel %d (%s) lacks a title, a description, a unit or a query, or names a data source of its own", p.ID, p.Title)
		}
	}
	var variables []string
	for _, v := range b.Templating.List {
		variables = append(variables, v.Name)
	}
	if want := []string{"datasource", "instance", "model", "backend"}; !slices.Equal(variables, want) {
		t.Errorf("its variables are %v, want %v", variables, want)
	}
}

const metricsReference = "docs/reference/metrics.md"

var update = flag.Bool("update", false, "write "+metricsReference)

const metricsIntroduction = `<!-- Generated by go generate ./metrics from the metrics of a running proxy. -->
# Metrics

` + "`GET /metrics`" + ` of the admin listener, which never needs a token; [the tasks](../tasks.md#watch-it-with-prometheus) say how to ` +
	`watch it. Metrics of the Go runtime and of the process (` + "`go_`, `process_`" +
	`) are there as well. Label values come from the configuration, the replicas' lists of models or a fixed set, never from a client. The ` +
	`series of a removed backend or model are deleted.

Histograms have classic buckets and, for a Prometheus with ` + "`--enable-feature=native-histograms`" +
	`, native ones. Durations and times to first token have request ids as exemplars (` + "`--enable-feature=exemplar-storage`" + `).

Counters use one word for each cause:

| Word | What happened |
|---|---|
| dropped | the proxy discarded it: a queue or a file was full or too slow |
| failed | the proxy tried, and the other side refused it or did not respond |
| missed | the sender had already deleted it when the proxy was to read it |
| ignored | the proxy read it and did not use it: invalid, or of another version |
| lost | a replica had it and has it no more: it restarted, or cleared its cache |
| missing | the request, or the replica, does not have it |
| aborted, disconnected, cancelled | the engine, the client or an operator ended the request |

| Name | Type | Labels | Meaning |
|---|---|---|---|
`

// TestMetricsReferenceIsCurrent compares the page of metrics with what a proxy exposes that has done something of every
// kind (go generate ./metrics writes it); and what the board and the alerts ask for.
func TestMetricsReferenceIsCurrent(t *testing.T) {
	m := startMonitored(t, redisAbsent)
	atStart := m.families()
	m.chat()
	m.mishap()
	families := m.families()
	want := metricsIntroduction
	for _, name := range slices.Sorted(maps.Keys(families)) {
		f := families[name]
		if f.GetHelp() == "" {
			t.Errorf("%s has no help", name)
		}
		want += fmt.Sprintf("| `%s` | %s | %s | %s |\n", name, strings.ToLower(f.GetType().String()), labelsOf(f, atStart[name]), f.GetHelp())
	}
	if *update {
		if err := os.WriteFile(metricsReference, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if got, err := os.ReadFile(metricsReference); err != nil || string(got) != want {
		t.Errorf("%s is out of date (%v): run go generate ./metrics", metricsReference, err)
	}
	for who, query := range queries(t) {
		checkMetricNames(t, who, query, families)
		checkMetricLabels(t, who, query, families)
	}
	for _, file := range markdownFiles(t) {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		checkMetricNames(t, file, string(text), families)
	}
}

// markdownFiles returns the README and the documents.
func markdownFiles(t *testing.T) []string {
	t.Helper()
	files := []string{"README.md"}
	for _, folder := range []string{"docs", filepath.Join("lab", "docs")} {
		err := filepath.WalkDir(folder, func(path string, _ fs.DirEntry, err error) error {
			if filepath.Ext(path) == ".md" {
				files = append(files, path)
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return files
}

// familyOf returns the family of a series: a histogram's have suffixes. It returns nil if there is none.
func familyOf(series string, families map[string]*dto.MetricFamily) *dto.MetricFamily {
	if f := families[series]; f != nil {
		return f
	}
	return families[regexp.MustCompile(`_(bucket|sum|count)$`).ReplaceAllString(series, "")]
}

// checkMetricNames reports an error for each name of a metric in text that the proxy does not expose. A name that ends
// with _ stands for all that begin with it.
func checkMetricNames(t *testing.T, where, text string, families map[string]*dto.MetricFamily) {
	t.Helper()
	for _, name := range regexp.MustCompile(`\bwarmroute_\w+`).FindAllString(text, -1) {
		known := familyOf(name, families) != nil
		for other := range families {
			known = known || strings.HasSuffix(name, "_") && strings.HasPrefix(other, name)
		}
		if !known {
			t.Errorf("%s names %s, which the proxy does not expose", where, name)
		}
	}
}

// checkMetricLabels reports an error for each label by which a query selects or groups series and that these do not have.
func checkMetricLabels(t *testing.T, where, query string, families map[string]*dto.MetricFamily) {
	t.Helper()
	all := []string{"job", "instance", "le"} // of the scrape, and of buckets
	for _, name := range regexp.MustCompile(`warmroute_\w+`).FindAllString(query, -1) {
		for _, series := range familyOf(name, families).GetMetric() {
			for _, l := range series.GetLabel() {
				all = append(all, l.GetName())
			}
		}
	}
	var used []string
	for _, group := range regexp.MustCompile(`\bby ?\(([^)]*)\)`).FindAllStringSubmatch(query, -1) {
		used = append(used, regexp.MustCompile(`\w+`).FindAllString(group[1], -1)...)
	}
	for _, selector := range regexp.MustCompile(`(\w+) ?(=|!=|=~|!~)"`).FindAllStringSubmatch(query, -1) {
		used = append(used, selector[1])
	}
	for _, label := range used {
		if !slices.Contains(all, label) {
			t.Errorf("%s uses the label %s, which its metrics do not have", where, label)
		}
	}
}

// labelsOf returns the labels of a metric, with the values of those that have a fixed set, which exist from the start.
func labelsOf(f, atStart *dto.MetricFamily) string {
	var labels []string
	for _, l := range f.Metric[0].Label {
		name, values := l.GetName(), map[string]bool{}
		if !slices.Contains([]string{"backend", "model", "key", "endpoint", "code", "version"}, name) {
			for _, series := range atStart.GetMetric() {
				for _, other := range series.Label {
					if other.GetName() == name {
						values["`"+other.GetValue()+"`"] = true
					}
				}
			}
		}
		text := "`" + name + "`"
		if len(values) > 0 {
			text += ": " + strings.Join(slices.Sorted(maps.Keys(values)), ", ")
		}
		labels = append(labels, text)
	}
	slices.Sort(labels)
	return strings.Join(labels, "; ")
}
