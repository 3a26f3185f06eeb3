//go:build prometheus

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

// prometheus is a real one that scrapes a proxy every second.
type prometheus struct {
	*program
	client *http.Client
}

func startPrometheus(t *testing.T, target string, features ...string) *prometheus {
	t.Helper()
	rules, err := filepath.Abs("scripts/monitoring/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	file := filepath.Join(folder, "prometheus.yml")
	if err := os.WriteFile(file, fmt.Appendf(nil, `
global: {scrape_interval: 1s, evaluation_interval: 1s}
rule_files: [%q]
scrape_configs: [{job_name: warmroute, static_configs: [{targets: [%q]}]}]
`, rules, strings.TrimPrefix(target, "http://")), 0o600); err != nil {
		t.Fatal(err)
	}
	args := []string{"--config.file=" + file, "--storage.tsdb.path=" + filepath.Join(folder, "data"), "--web.listen-address=127.0.0.1:0",
		"--log.level=info"}
	if len(features) > 0 {
		args = append(args, "--enable-feature="+strings.Join(features, ","))
	}
	p := &prometheus{program: launch(t, exec.Command("prometheus", args...)), client: &http.Client{Transport: &http.Transport{}}}
	t.Cleanup(p.client.CloseIdleConnections)
	p.url = "http://" + p.awaitLog(`msg="Listening on" address=(\S+)`)
	p.eventually("Prometheus is ready", func() bool {
		resp, err := p.client.Get(p.url + "/-/ready")
		return err == nil && status(resp) == http.StatusOK
	})
	return p
}

// get asks the API and decodes what it answers with.
func (p *prometheus) get(path string, values url.Values, into any) {
	p.t.Helper()
	resp, err := p.client.Get(p.url + "/api/v1/" + path + "?" + values.Encode())
	if err != nil {
		p.t.Fatal(err)
	}
	defer resp.Body.Close()
	answer := struct {
		Status, Error string
		Data          any
	}{Data: into}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil || answer.Status != "success" {
		p.t.Fatalf("%s of %v: %v %s", path, values, err, answer.Error)
	}
}

// values are the numbers that a query gives, those that are none left out.
func (p *prometheus) values(query string) (out []string) {
	p.t.Helper()
	var data struct {
		Result []struct{ Value [2]any }
	}
	p.get("query", url.Values{"query": {query}}, &data)
	for _, r := range data.Result {
		if v := fmt.Sprint(r.Value[1]); v != "NaN" {
			out = append(out, v)
		}
	}
	return out
}

// filled puts something in the place of a board's variables, and has an alert's
// comparison give its outcome, so that a query has a result whatever that is.
func filled(who, query string) string {
	if strings.HasPrefix(who, "alert ") {
		return regexp.MustCompile(`(==|>) `).ReplaceAllString(query, "$1 bool ")
	}
	return strings.NewReplacer("$__rate_interval", "1m", "$__range", "1m", "$instance", ".*", "$model", ".*", "$backend", ".*").Replace(query)
}

// TestPrometheusAnswersEveryQuery has real ones scrape a proxy, one as it comes and
// one that takes native histograms and no others, and asks both all that the board
// and the alerts ask.
func TestPrometheusAnswersEveryQuery(t *testing.T) {
	m := startMonitored(t, redisAbsent)
	m.chat()
	plain := startPrometheus(t, m.admin, "exemplar-storage")
	native := startPrometheus(t, m.admin, "native-histograms", "exemplar-storage")
	both := map[string]*prometheus{"as it comes": plain, "with native histograms": native}
	for _, p := range both {
		p.eventually("the first scrape", func() bool { return len(p.values("warmroute_build_info")) > 0 })
	}
	m.mishap() // after the first scrape, or there were no increase
	m.chat()
	for name, p := range both {
		for who, query := range queries(t) {
			last := filled(who, query)
			p.eventually(name+": "+who+" has data: "+last, func() bool { return len(p.values(last)) > 0 })
		}
		var rules struct {
			Groups []struct {
				Rules []struct{ Name, Health, LastError string }
			}
		}
		p.eventually(name+": all alerts are evaluated", func() bool {
			p.get("rules", nil, &rules)
			return len(rules.Groups) == 1 && !slices.ContainsFunc(rules.Groups[0].Rules, func(r struct{ Name, Health, LastError string }) bool {
				return r.Health != "ok"
			})
		})
		if got, want := len(rules.Groups[0].Rules), len(readAlerts(t)); got != want {
			t.Errorf("%s: it has %d rules, want %d", name, got, want)
		}
	}
	for _, name := range []string{"request_duration_seconds", "ttft_seconds", "itl_seconds", "overhead_seconds", "queue_seconds"} {
		native.eventually(name+" is a native histogram", func() bool {
			return len(native.values("sum(histogram_count(warmroute_"+name+")) > 0")) == 1
		})
		if classic := native.values("warmroute_" + name + "_bucket"); len(classic) > 0 {
			t.Errorf("%s has classic buckets beside its native ones, so nothing above was about those", name)
		}
	}
}

// TestPrometheusKeepsTheRequestsIDs asks for exemplars, as a board does.
func TestPrometheusKeepsTheRequestsIDs(t *testing.T) {
	m := startMonitored(t, "")
	m.chat()
	for _, features := range [][]string{{"exemplar-storage"}, {"exemplar-storage", "native-histograms"}} {
		p := startPrometheus(t, m.admin, features...)
		p.eventually("exemplars of TTFT", func() bool {
			var found []struct {
				Exemplars []struct{ Labels map[string]string }
			}
			now := time.Now()
			p.get("query_exemplars", url.Values{
				"query": {"warmroute_ttft_seconds_bucket or warmroute_ttft_seconds"},
				"start": {now.Add(-time.Hour).Format(time.RFC3339)}, "end": {now.Add(time.Hour).Format(time.RFC3339)},
			}, &found)
			return len(found) > 0 && strings.HasPrefix(found[0].Exemplars[0].Labels["request_id"], "wr-")
		})
	}
}

func TestPromtool(t *testing.T) {
	m := startMonitored(t, "")
	m.chat()
	m.mishap()
	for _, c := range []struct {
		stdin string
		args  []string
	}{
		{m.exposition(), []string{"check", "metrics"}},
		{"", []string{"check", "config", "scripts/monitoring/prometheus.yml"}},
		{"", []string{"check", "rules", "scripts/monitoring/alerts.yml"}},
		{"", []string{"test", "rules", "scripts/monitoring/alerts_test.yml"}},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		cmd := exec.CommandContext(ctx, "promtool", c.args...)
		cmd.Stdin = strings.NewReader(c.stdin)
		if output, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(c.args, " "), err, output)
		}
	}
}
