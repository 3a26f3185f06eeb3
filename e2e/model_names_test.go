//go:build unix

package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"

	"warmroute/lab/freeport"
	"warmroute/lab/sim"
	"warmroute/lab/sim/engine"
)

// namedModels is a proxy in front of simulated replicas of coder-v2 and coder-v1, which the name coder stands for.
type namedModels struct {
	*program
	file         *configFile
	killV2       func()
	restartV2    func()
	conversation int
}

const coderNames = `models:
  names:
    - name: coder
      models: [coder-v2, coder-v1]
      fallback_after: 2s
      set: {ignore_eos: true}
      max_output_tokens: 8
    - {name: gpt-4o, model: lora-a}
`

func startNamedModels(t *testing.T) *namedModels {
	t.Helper()
	m := &namedModels{}
	c := sim.Config{Engine: engine.Config{KVTokens: 200_000, Speed: 20}, Model: "coder-v2", Adapters: []string{"lora-a"}, StoreResponses: true}
	v2, kill := startSimReplica(t, c, freeport.FindAddress(t))
	m.killV2 = kill
	m.restartV2 = func() { _, m.killV2 = startSimReplica(t, c, strings.TrimPrefix(v2, "http://")) }
	older := c
	older.Model, older.Adapters = "coder-v1", nil
	v1, _ := startSimReplica(t, older, "127.0.0.1:0")
	fleet := &simFleet{urls: []string{v2, v1}}
	m.file = fleet.configFile(t, "health: {interval: 200ms, down_interval: 100ms}\n"+coderNames)
	m.program = startProgram(t, "--config", m.file.path)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	return m
}

// turn sends a turn of a conversation and returns the response's status, model and header. It does not fail the test.
func (m *namedModels) turn(model, conversation string, stream bool) (status int, header http.Header, body string) {
	first := conversation + strings.Repeat(" word", 200)
	request := fmt.Sprintf(`{"model":%q,"stream":%v,"prompt_cache_key":%q,"messages":[{"role":"user","content":%q},`+
		`{"role":"assistant","content":"a"},{"role":"user","content":"b"}]}`, model, stream, conversation, first)
	resp, err := http.Post(m.url+"/v1/chat/completions", "application/json", strings.NewReader(request))
	if err != nil {
		return 0, nil, err.Error()
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, nil, err.Error()
	}
	return resp.StatusCode, resp.Header, string(text)
}

// servedBy sends a turn and returns the model that served it.
func (m *namedModels) servedBy(conversation string) string {
	m.t.Helper()
	status, header, body := m.turn("coder", conversation, false)
	var r struct {
		Model string
		Usage struct {
			Tokens int `json:"completion_tokens"`
		}
	}
	if json.Unmarshal([]byte(body), &r) != nil || status != http.StatusOK || r.Usage.Tokens != 8 ||
		r.Model != header.Get("X-Warmroute-Model") {
		m.t.Fatalf("%s: got %d %s, header %v", conversation, status, body, header)
	}
	return r.Model
}

// While the replica of the preferred model restarts for longer than fallback_after, requests wait and then go to the next model,
// on which their conversations stay.
func TestModelNamesFallBack(t *testing.T) {
	t.Parallel()
	m := startNamedModels(t)
	m.eventually("coder-v2 serves coder", func() bool {
		_, header, _ := m.turn("coder", "first", false)
		return header.Get("X-Warmroute-Model") == "coder-v2"
	})
	if by := m.servedBy("old"); by != "coder-v2" {
		t.Fatalf("%s serves coder", by)
	}
	m.killV2()
	var clients sync.WaitGroup
	for i := range 8 { // none of them fails
		clients.Go(func() {
			status, header, body := m.turn("coder", fmt.Sprint("meanwhile ", i), i%2 == 0)
			if status != http.StatusOK || header.Get("X-Warmroute-Model") != "coder-v1" || i%2 == 0 && !strings.Contains(body, "[DONE]") {
				t.Errorf("client %d: got %d %s, header %v", i, status, body, header)
			}
		})
	}
	clients.Wait()
	if by := m.servedBy("old"); by != "coder-v1" {
		t.Errorf("%s serves coder while coder-v2 is down", by)
	}
	m.restartV2()
	m.eventually("new conversations go to coder-v2", func() bool {
		m.conversation++
		return m.servedBy(fmt.Sprint("new ", m.conversation)) == "coder-v2"
	})
	for _, conversation := range []string{"old", "meanwhile 3"} {
		if by := m.servedBy(conversation); by != "coder-v1" {
			t.Errorf("%q moved to %s", conversation, by)
		}
	}
	if n := metricSum(t, m.admin, "warmroute_named_requests_total", "coder", "coder-v1", "200"); n < 11 {
		t.Errorf("%v requests of coder are counted for coder-v1", n)
	}
}

func TestModelNamesWithSDK(t *testing.T) {
	t.Parallel()
	m := startNamedModels(t)
	client := openai.NewClient(option.WithBaseURL(m.url+"/v1"), option.WithAPIKey("none"), option.WithMaxRetries(0))
	m.eventually("all names are listed", func() bool {
		models, err := client.Models.List(t.Context())
		var ids []string
		if err == nil {
			for _, model := range models.Data {
				ids = append(ids, model.ID)
			}
		}
		return strings.Join(ids, " ") == "coder-v2 lora-a coder-v1 coder gpt-4o"
	})
	for name, want := range map[string]string{"coder": "coder-v2", "gpt-4o": "lora-a"} {
		answer, err := client.Chat.Completions.New(t.Context(), openai.ChatCompletionNewParams{
			Model: name, Messages: []openai.ChatCompletionMessageParamUnion{openai.UserMessage("Hello")}, MaxTokens: openai.Int(3)})
		if err != nil || answer.Model != want || answer.Usage.CompletionTokens > 3 {
			t.Errorf("%s: got %+v, %v", name, answer, err)
		}
	}
	request := filepath.Join(t.TempDir(), "request.json")
	if err := os.WriteFile(request, []byte(`{"model":"coder","messages":[{"role":"user","content":"Hello"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	_, explained, _ := runCommand(t, "explain", "--admin", m.admin, "-f", request)
	if !strings.Contains(explained, "coder stands for coder-v2, the first of its models.") {
		t.Errorf("explain says %s", explained)
	}
	m.file.write("health: {interval: 200ms, down_interval: 100ms}\n" + strings.Replace(coderNames, "name: coder", "name: other", 1))
	m.signal(syscall.SIGHUP)
	m.reloaded("ok", 1)
	if status, _, body := m.turn("coder", "x", false); status != http.StatusNotFound || !strings.Contains(body, "gpt-4o") {
		t.Errorf("a removed name: got %d %s", status, body)
	}
	if status, header, body := m.turn("other", "x", false); status != http.StatusOK || header.Get("X-Warmroute-Model-Name") != "other" {
		t.Errorf("a new name: got %d %s", status, body)
	}
	m.file.write("models: {names: [{name: a, model: b}, {name: b, model: c}]}")
	m.signal(syscall.SIGHUP)
	m.reloaded("failed", 1)
	m.awaitLog(`err="models.names\[0\].model: b is a name of models.names itself`)
}
