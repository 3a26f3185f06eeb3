package e2e

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/tidwall/gjson"
)

// statefulConversation is a conversation by previous_response_id.
type statefulConversation struct {
	model    string
	backend  string // that has answered the first turn
	previous string // id of the last response
	turns    int    // so far
	lost     bool   // the last turn got the 404 of a response that is lost
}

// continueWith sends the next turn of a conversation, and the whole of it where its state is lost.
func (c *statefulConversation) continueWith(t *testing.T, client *http.Client, url string, i int) {
	input := fmt.Sprintf("Conversation %d, turn %d. %s", i, c.turns, strings.Repeat("What do you make of this? ", 20))
	body := fmt.Sprintf(`{"model":%q,"max_output_tokens":8,"stream":%v,"input":%q`, c.model, (i+c.turns)%2 == 0, input)
	if c.previous != "" {
		body += `,"previous_response_id":"` + c.previous + `"`
	}
	resp, err := client.Post(url+"/v1/responses", "application/json", strings.NewReader(body+"}"))
	if err != nil {
		t.Errorf("conversation %d: %v", i, err)
		return
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	backend := resp.Header.Get("X-Warmroute-Backend")
	switch {
	case err != nil:
		t.Errorf("conversation %d: %v", i, err)
	case resp.StatusCode == http.StatusNotFound:
		c.lost = true
		if e := gjson.GetBytes(answer, "error"); e.Get("code").Str != "previous_response_not_found" ||
			!strings.Contains(e.Get("message").Str, "Send the whole conversation") {
			t.Errorf("conversation %d: %s", i, answer)
		}
	case resp.StatusCode != http.StatusOK:
		t.Errorf("conversation %d: status %d %s", i, resp.StatusCode, answer)
	case c.previous != "" && backend != c.backend:
		t.Errorf("conversation %d was on %s, and now on %s", i, c.backend, backend)
	default:
		c.lost, c.backend, c.previous = false, backend, responseID(string(answer))
		c.turns++
	}
}

// responseID returns the id of a whole or streamed response.
func responseID(answer string) string {
	if _, event, streamed := strings.Cut(answer, "data: "); streamed {
		event, _, _ = strings.Cut(event, "\n")
		return gjson.Get(event, "response.id").Str
	}
	return gjson.Get(answer, "id").Str
}

// TestStoredResponses plays 200 conversations by previous_response_id over four replicas, of which
// one is restarted between two turns and the proxy between two others. None may be sent to a
// replica that does not have its state; those whose state is lost get the error that says so.
func TestStoredResponses(t *testing.T) {
	t.Parallel()
	const conversations = 200
	var replicas []*simProcess
	var urls []string
	for range 4 {
		r := startSimProcess(t, "--speed", "20", "--store-responses")
		replicas, urls = append(replicas, r), append(urls, "http://"+r.address)
	}
	file := (&simFleet{}).configFile(t, fmt.Sprintf("backends: [%s]\nindex: {snapshot: %q}", strings.Join(urls, ", "), t.TempDir()+"/index"))
	p := startProgram(t, "--config", file.path)
	allReady := func() bool { return metricSum(t, p.admin, "warmroute_backend_ready") == 4 }
	p.eventually("all are ready", allReady)
	transport := &http.Transport{MaxIdleConnsPerHost: 32}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport}

	all := make([]statefulConversation, conversations)
	for i := range all {
		all[i].model = "sim"
	}
	turn := func() {
		t.Helper()
		var playing sync.WaitGroup
		for worker := range 20 {
			playing.Go(func() {
				for i := worker; i < conversations; i += 20 {
					all[i].continueWith(t, client, p.url, i)
				}
			})
		}
		playing.Wait()
	}
	countLost := func() (lost int) {
		for i := range all {
			if all[i].lost {
				lost++
			}
		}
		return lost
	}
	turn()
	turn()
	on := map[string]int{}
	for i := range all {
		on[all[i].backend]++
	}
	if len(on) != 4 || countLost() != 0 {
		t.Fatalf("conversations by replica: %v, %d lost", on, countLost())
	}

	restarted := replicas[1].address
	replicas[1].stop()
	replicas[1].start()
	turn()
	if n := countLost(); n != on[restarted] {
		t.Errorf("%d conversations are lost, but %d were on the replica that was restarted", n, on[restarted])
	}
	for i := range all {
		if c := &all[i]; c.lost && c.backend != restarted {
			t.Errorf("conversation %d was on %s, and is lost", i, c.backend)
		} else if c.lost {
			c.previous = "" // the client sends the whole conversation
		}
	}
	p.eventually("all are ready again", allReady)
	turn()
	p.signal(syscall.SIGTERM)
	p.exit()
	transport.CloseIdleConnections()
	p = startProgram(t, "--config", file.path)
	p.eventually("all are ready after the proxy's restart", allReady)
	found := metricSum(t, p.admin, "warmroute_stored_responses")
	turn()
	if countLost() != 0 || found < conversations {
		t.Errorf("after the proxy's restart %v responses are known, and %d conversations lost", found, countLost())
	}
	for i := range all {
		if all[i].turns < 4 {
			t.Errorf("conversation %d had %d turns", i, all[i].turns)
		}
	}
}
