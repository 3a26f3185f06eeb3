package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/openai/openai-go/v3"
	"github.com/openai/openai-go/v3/option"
	"github.com/openai/openai-go/v3/packages/ssestream"

	"warmroute/sim"
)

// expectError fails unless err is the SDK's error with that status.
func expectError(t *testing.T, err error, status int) *openai.Error {
	t.Helper()
	var e *openai.Error
	if !errors.As(err, &e) || e.StatusCode != status || e.Message == "" {
		t.Fatalf("got %v, want the SDK's error with status %d and a message", err, status)
	}
	return e
}

func (f *sdkFleet) unknownModel(t *testing.T) {
	p := f.chat(5, 1)
	p.Model = "nobody"
	_, err := f.client.Chat.Completions.New(t.Context(), p)
	if e := expectError(t, err, http.StatusNotFound); e.Code != "model_not_found" || !strings.Contains(e.Message, f.model) {
		t.Errorf("code %q, message %q", e.Code, e.Message)
	}
	_, err = f.stream(t, p)
	expectError(t, err, http.StatusNotFound)
}

func (f *sdkFleet) promptTooLong(t *testing.T) {
	p := f.chat(20_000, 1)
	_, err := f.client.Chat.Completions.New(t.Context(), p)
	if e := expectError(t, err, http.StatusBadRequest); !strings.Contains(e.Message, "maximum context length") {
		t.Errorf("message %q", e.Message)
	}
	_, err = f.stream(t, p)
	expectError(t, err, http.StatusBadRequest)
}

func (f *sdkFleet) notJSON(t *testing.T) {
	for _, body := range []string{"", "{", `{"model":"` + f.model + `","messages":[`, "\xff\xfe", "[1]"} {
		body := option.WithRequestBody("application/json", []byte(body))
		expectError(t, f.client.Post(t.Context(), "chat/completions", nil, nil, body), http.StatusBadRequest)
	}
}

func (f *sdkFleet) unknownPath(t *testing.T) {
	_, err := f.client.Batches.List(t.Context(), openai.BatchListParams{})
	expectError(t, err, http.StatusNotFound)
}

// unfinished is the length of an answer that nobody can mistake for one that
// ran to its end when it was cut: most of the context window.
const unfinished = 7000

func (f *sdkFleet) awaitIdle(t *testing.T) {
	t.Helper()
	f.eventually(t, "all replicas idle", func() bool { return running(t, f.replicas...) == 0 })
}

func (f *sdkFleet) leaveInMidStream(t *testing.T) {
	f.awaitIdle(t)
	before := f.generated(t)
	s := f.client.Chat.Completions.NewStreaming(t.Context(), f.chat(20, unfinished))
	for range 5 {
		if !s.Next() {
			t.Fatal("the stream ended early: ", s.Err())
		}
	}
	s.Close()
	f.checkFreed(t, before)
}

func (f *sdkFleet) leavePlainRequest(t *testing.T) {
	f.awaitIdle(t)
	before := f.generated(t)
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	left := make(chan error, 1)
	go func() {
		_, err := f.client.Chat.Completions.New(ctx, f.chat(20, unfinished))
		left <- err
	}()
	f.eventually(t, "the request runs", func() bool { return running(t, f.replicas...) > 0 })
	leave()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	f.checkFreed(t, before)
}

// checkFreed fails unless the replicas stop computing, and the proxy counting,
// before the answer is complete.
func (f *sdkFleet) checkFreed(t *testing.T, generatedBefore float64) {
	t.Helper()
	f.awaitIdle(t)
	if n := f.generated(t) - generatedBefore; n >= unfinished {
		t.Errorf("%.0f tokens were computed for a client that had left", n)
	}
	f.awaitNoneInFlight(t)
}

func (f *sdkFleet) awaitNoneInFlight(t *testing.T) {
	t.Helper()
	f.eventually(t, "nothing in flight", func() bool { return f.proxyMetric(t, "warmroute_backend_in_flight") == 0 })
}

// What plays while the replica dies: chats at once, of so many turns each.
const (
	killChats = 30
	killTurns = 3
)

// killCounts is what became of the turns.
type killCounts struct {
	answered atomic.Int64
	retried  atomic.Int64 // answers that took more than one attempt
	broken   atomic.Int64 // streams that ended with an error after they had begun
}

func (f *sdkFleet) replicaKilled(t *testing.T) {
	victim := f.replicas[len(f.replicas)-1]
	var counts killCounts
	var playing sync.WaitGroup
	for i := range killChats {
		playing.Go(func() {
			if err := f.playWhileKilled(t, &counts, i%2 == 0); err != nil {
				t.Error(err)
			}
		})
	}
	f.eventually(t, "the victim works and turns are answered", func() bool {
		return counts.answered.Load() > 0 && running(t, victim) > 0
	})
	f.kill()
	playing.Wait()
	f.restart()

	answered, retried, broken := counts.answered.Load(), counts.retried.Load(), counts.broken.Load()
	t.Logf("%d answered, %d of them by another replica, %d streams broken after they began", answered, retried, broken)
	if answered+broken != killChats*killTurns {
		t.Errorf("%d turns of %d are accounted for", answered+broken, killChats*killTurns)
	}
	if retried+broken == 0 {
		t.Error("the victim had nothing to lose: the test showed nothing")
	}
	f.awaitNoneInFlight(t)
	f.eventually(t, "the restarted replica gets traffic again", func() bool {
		var resp *http.Response
		if _, err := f.client.Chat.Completions.New(t.Context(), f.chat(80, 1), option.WithResponseInto(&resp)); err != nil {
			t.Fatal(err)
		}
		return strings.HasSuffix(resp.Header.Get("X-Warmroute-Backend"), ":"+port(t, victim))
	})
}

// playWhileKilled plays one chat. A plain request has to succeed whatever
// happens; a stream may end with an error, but only one that it carries itself,
// after it has begun.
func (f *sdkFleet) playWhileKilled(t *testing.T, counts *killCounts, stream bool) error {
	p := f.chat(100, 100)
	for range killTurns {
		turn := f.plainTurn
		if stream {
			turn = f.streamedTurn
		}
		text, err := turn(t, counts, p)
		if err != nil {
			return err
		}
		p.Messages = append(p.Messages, openai.AssistantMessage(text), openai.UserMessage(words(20)))
	}
	return nil
}

func (f *sdkFleet) plainTurn(t *testing.T, counts *killCounts, p openai.ChatCompletionNewParams) (string, error) {
	var resp *http.Response
	answer, err := f.client.Chat.Completions.New(t.Context(), p, option.WithResponseInto(&resp))
	if err != nil {
		return "", fmt.Errorf("a request that was not committed failed: %w", err)
	}
	counts.add(resp.Header)
	return answer.Choices[0].Message.Content, nil
}

func (f *sdkFleet) streamedTurn(t *testing.T, counts *killCounts, p openai.ChatCompletionNewParams) (string, error) {
	got, err := f.stream(t, p)
	switch {
	case err == nil && got.finish == "length":
		counts.add(got.header)
	case err == nil:
		return "", fmt.Errorf("a stream ended with finish_reason %q and no error", got.finish)
	case got.chunks == 0:
		return "", fmt.Errorf("a stream that was not committed failed: %w", err)
	case !errors.As(err, new(*ssestream.StreamError)):
		return "", fmt.Errorf("a stream was cut, without an error event: %w", err)
	default:
		counts.broken.Add(1)
	}
	return got.text, nil
}

func (c *killCounts) add(header http.Header) {
	c.answered.Add(1)
	if header.Get("X-Warmroute-Attempts") != "1" {
		c.retried.Add(1)
	}
}

// TestSDKSeesAbortedStreamFail holds that an SDK does not take the part of an answer
// for the whole that a replica's engine has aborted.
func TestSDKSeesAbortedStreamFail(t *testing.T) {
	f := &sdkFleet{model: "sim"}
	url, _ := startSimReplica(t, sim.Config{}, "127.0.0.1:0")
	f.replicas = []string{url}
	f.startProxy(t)
	resp, err := http.Post(url+"/sim/fault", "application/json", strings.NewReader(`{"kind":"abort-each","chunks":3,"requests":1}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		t.Fatalf("the fault gets status %d", resp.StatusCode)
	}
	got, err := f.stream(t, f.chat(20, 100))
	var e *ssestream.StreamError
	if !errors.As(err, &e) || !strings.Contains(e.Error(), "replica_aborted") || got.text == "" || got.finish != "" {
		t.Errorf("got %q, finish_reason %q and the error %v", got.text, got.finish, err)
	}
	if n := f.proxyMetric(t, "warmroute_backend_aborted_responses_total"); n != 1 {
		t.Errorf("%v aborted responses were counted", n)
	}
}
