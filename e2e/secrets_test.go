package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// oursOf are the lines of an answer that the proxy itself wrote.
func oursOf(answer string) (ours []string) {
	for line := range strings.Lines(answer) {
		if strings.Contains(line, `"src":"warmroute"`) {
			ours = append(ours, line)
		}
	}
	return ours
}

// TestNoSecretsInOutput makes everything fail that can, with everything
// marked, and looks for the mark in the log, in the metrics and in the errors.
func TestNoSecretsInOutput(t *testing.T) {
	t.Parallel()
	var names, answers []string
	for name, answer := range markedAnswers() {
		names, answers = append(names, name), append(answers, answer)
	}
	folder := t.TempDir()
	write := func(name, text string) string {
		t.Helper()
		path := filepath.Join(folder, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	const config = `listen: 127.0.0.1:0
admin: 127.0.0.1:0
log: {level: debug}
access_log: {file: stderr, format: text}
health: {down_interval: 10ms}
breaker: {failures: 0}
routing: {attempts: 1}
admin_token: MARK-of-the-operators
keys_file: %s
keys: [{name: slow, tokens_per_minute: 1000}]
backends: [{name: r, url: "%s", api_key: MARK-of-the-replica}]
`
	url := markedReplica(t, answers)
	keysFile := write("keys", "a MARK-of-the-client-a-long-one\nslow MARK-of-the-client-another-one\n")
	file := write("warmroute.yaml", fmt.Sprintf(config, keysFile, url))
	p := startProgram(t, "--config", file)
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, CheckRedirect: func(*http.Request, []*http.Request) error {
		return http.ErrUseLastResponse
	}}

	ask := func(name, path, key, body string, headers ...string) (status int) {
		t.Helper()
		req, err := http.NewRequest(http.MethodPost, p.url+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer "+key)
		for i := 0; i < len(headers); i += 2 {
			req.Header.Set(headers[i], headers[i+1])
		}
		resp, err := client.Do(req)
		if err != nil {
			return 0 // cut off, as the replica cut off the proxy
		}
		defer resp.Body.Close()
		answer, _ := io.ReadAll(resp.Body)
		for _, line := range oursOf(string(answer)) {
			if strings.Contains(line, mark) {
				t.Errorf("%s: the proxy says %s", name, line)
			}
		}
		if all := fmt.Sprint(resp.Header, string(answer)); strings.Contains(all, "MARK-of") {
			t.Errorf("%s: a key is in the answer: %.500s", name, all)
		}
		return resp.StatusCode
	}
	const key = "MARK-of-the-client-a-long-one"
	for i, name := range names {
		for _, stream := range []string{"true", "false"} {
			ask(name, "/v1/chat/completions?api_key="+marked, key,
				fmt.Sprintf(`{"model":"m","stream":%s,"messages":[{"role":"user","content":"case %d %s"}]}`, stream, i, marked))
		}
	}
	question := `{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat(marked, 100) + `"}]}`
	for _, c := range []struct {
		name, path, key, body string
		headers               []string
		want                  int
	}{
		{"good", "/v1/chat/completions", key, question, nil, 200},
		{"an id that is the key", "/v1/chat/completions", key, question, []string{"X-Request-Id", key}, 200},
		{"no JSON", "/v1/chat/completions", key, marked, nil, 400},
		{"half of it", "/v1/chat/completions", key, question[:200], nil, 400},
		{"a key twice", "/v1/chat/completions", key, `{"model":"m","model":"` + marked + `"}`, nil, 400},
		{"a number", "/v1/chat/completions", key, `{"model":"m","messages":"` + marked + `"}`, nil, 400},
		{"a wrong key", "/v1/chat/completions", marked, question, nil, 401},
		{"a wrong priority", "/v1/chat/completions", key, question, []string{"X-Warmroute-Priority", marked}, 400},
		{"another path", "/v1/" + marked, key, question, nil, 404},
		{"over the rate", "/v1/chat/completions", "MARK-of-the-client-another-one", question, nil, 200},
		{"over the rate, again", "/v1/chat/completions", "MARK-of-the-client-another-one", question, nil, 429},
	} {
		if status := ask(c.name, c.path, c.key, c.body, c.headers...); status != c.want {
			t.Errorf("%s: got %d, want %d", c.name, status, c.want)
		}
	}
	rawRequests(t, strings.TrimPrefix(p.url, "http://"))
	operate(t, p, client)

	// Configurations that do not load, and at last one that does.
	for i, bad := range markedConfigs(url, write) {
		write("warmroute.yaml", "log: {level: debug}\n"+bad)
		p.signal(syscall.SIGHUP)
		p.eventually("reload failed", func() bool { return strings.Count(p.log.String(), "config reload failed") > i })
		if status, _, output := runCommand(t, "check", "--config", file); status != 2 || strings.Contains(output, mark) {
			t.Errorf("check of\n%s\nends with %d, %s", bad, status, output)
		}
	}
	write("warmroute.yaml", fmt.Sprintf(config, keysFile, url)+"tenant: isolate\n")
	p.signal(syscall.SIGHUP)
	p.awaitLog("config reloaded")
	exposition, withIDs := p.exposition(), p.expositionAs("application/openmetrics-text; version=1.0.0")
	_, finished, _ := runCommand(t, "requests", "--admin", p.admin, "--token-file", writeFile(t, "MARK-of-the-operators"), "--limit", "10000",
		"--json")
	p.signal(syscall.SIGTERM)
	p.exit()

	for what, text := range map[string]string{"log": p.log.String(), "metrics": exposition, "exemplars": withIDs,
		"finished requests": finished} {
		for line := range strings.Lines(text) {
			if strings.Contains(line, mark) {
				t.Errorf("in the %s: %.300s", what, line)
			}
		}
	}
	// What would have shown it was there.
	for _, want := range []string{"attempt failed", "upstream closed the response early", "level=INFO msg=request", "config reload failed",
		`msg="operator action" action=drain`} {
		if !strings.Contains(p.log.String(), want) {
			t.Errorf("nothing in the log says %q: the test has missed it", want)
		}
	}
	if !strings.Contains(finished, `"key":"slow"`) {
		t.Error("there are no finished requests: the test has missed them")
	}
	if !strings.Contains(withIDs, `{request_id="`) {
		t.Error("the metrics show no request's id: the test has missed them")
	}
	if !strings.Contains(exposition, `warmroute_key_refusals_total{key="slow",reason="tokens"} 1`) {
		t.Error("the metrics tell nothing of keys: the test has missed them")
	}
}

// rawRequests sends what no HTTP client would.
func rawRequests(t *testing.T, addr string) {
	t.Helper()
	for _, request := range []string{
		marked + "\r\n\r\n", "GET /" + marked + "\r\n\r\n", "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n" + marked + "\r\n\r\n",
		"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + marked + "\r\n\r\n", "GET http://" + marked +
			":x/ HTTP/1.1\r\nHost: x\r\n\r\n",
		"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer MARK-of-the-client-a-long-one\r\nTransfer-Encoding: " +
			"chunked\r\n\r\n" + marked + "\r\n",
		"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer MARK-of-the-client-a-long-one\r\nContent-Length: 999\r\n\r\n" +
			marked,
		"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer MARK-of-the-client-a-long-one\r\nContent-Length: " +
			"99999999999\r\n\r\n" + marked,
	} {
		c, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(time.Minute))
		io.WriteString(c, request)
		c.(*net.TCPConn).CloseWrite()
		answer, _ := io.ReadAll(c)
		c.Close()
		if strings.Contains(string(answer), mark) {
			t.Errorf("%.100q is answered with %s", request, answer)
		}
	}
}

// operate asks the admin listener for what it refuses, and for a drain.
func operate(t *testing.T, p *program, client *http.Client) {
	t.Helper()
	for _, c := range []struct {
		token string
		want  int
	}{{"MARK-of-nobody-at-all", 401}, {"MARK-of-the-operators", 200}} {
		for _, verb := range []string{"drain", "undrain"} {
			req, err := http.NewRequest(http.MethodPost, p.admin+"/api/backends/r/"+verb, nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer "+c.token)
			req.Header.Set("Content-Type", "application/json")
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			answer, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if resp.StatusCode != c.want || strings.Contains(string(answer), mark) {
				t.Errorf("%s: got %d %s", verb, resp.StatusCode, answer)
			}
		}
	}
}

// exposition is the metrics as Prometheus would read them.
func (p *program) exposition() string { return p.expositionAs("text/plain") }

// expositionAs is the metrics in a format.
func (p *program) expositionAs(accept string) string {
	p.t.Helper()
	req, err := http.NewRequest(http.MethodGet, p.admin+"/metrics", nil)
	if err != nil {
		p.t.Fatal(err)
	}
	req.Header.Set("Accept", accept)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		p.t.Fatal(err)
	}
	defer http.DefaultClient.CloseIdleConnections()
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		p.t.Fatal(err)
	}
	return string(text)
}
