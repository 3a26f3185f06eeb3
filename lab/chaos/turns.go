package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"warmroute/lab/loadgen"
	"warmroute/lab/testbed"
)

const (
	turnsClients = 16 // of each key
	turnsCounted = 80 // responses of both keys together, of which each key's are counted
	turnsWarmup  = 60 // before these
	// minTurnsShare is 0.9 of the half that a key is due beside another one.
	minTurnsShare      = 0.45
	plainKey, turnsKey = "sk-of-the-plain-prompts", "sk-of-the-later-turns"

	// turnsMaxInFlight is the limit of the replica: seven in eight of the clients' requests are queued.
	turnsMaxInFlight = "max_in_flight: 4"
	// turnsStepTime is that of the replica's engine: a response takes much longer than its prompt. Fairness charges keys for
	// prompts, which would hide most of a lead.
	turnsStepTime     = "10ms"
	turnsPromptBytes  = 500
	turnsOutputTokens = 6
)

// sendLaterTurns sends the requests of two keys to one replica with room for a few. Those of one key look like later turns of
// a conversation, or are. The other key gets its half.
func sendLaterTurns(ctx context.Context, r *rig) (err error) {
	one, err := r.newReplica("turns", "--step-time", turnsStepTime)
	if err != nil {
		return err
	}
	one.Settings = turnsMaxInFlight
	if err := r.startAndAwaitHealthy(ctx, []*testbed.Replica{one}); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, testbed.KillAndWait(one)) }()
	settings := fmt.Sprintf("timeouts: {serve_after_term: 0}\nkeys: [{name: plain, sha256: %x}, {name: turns, sha256: %x}]",
		sha256.Sum256([]byte(plainKey)), sha256.Sum256([]byte(turnsKey)))
	proxy, err := r.newProxy("turns", settings)
	if err != nil {
		return err
	}
	if err := proxy.WriteConfig([]*testbed.Replica{one}); err != nil {
		return err
	}
	if err := proxy.StartAndAwait(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, proxy.Terminate(waitTimeout)) }()
	for _, c := range []struct {
		name    string
		session string
		grows   bool
	}{
		{name: "few-shot prompts with one first message"},
		{name: "one session for all prompts", session: "job"},
		{name: "conversations that grow", grows: true},
	} {
		plain, turns := r.countTurns(ctx, proxy.URL, c.session, c.grows)
		share := float64(plain) / float64(max(1, plain+turns))
		r.verdict.addMeasurement("%s: the other key has %.2f of the responses", c.name, share)
		r.verdict.require(share >= minTurnsShare, "beside a key with %s, the other key got %d responses of %d", c.name, plain, plain+turns)
	}
	return ctx.Err()
}

// countTurns returns how many of turnsCounted responses each key gets: one whose prompts have nothing in common, and one whose
// prompts are later turns.
func (r *rig) countTurns(ctx context.Context, url, session string, grows bool) (plain, turns int) {
	httpClient := loadgen.NewHTTPClient()
	defer httpClient.CloseIdleConnections()
	header := http.Header{}
	if session != "" {
		header.Set("X-Session-Id", session)
	}
	senders := map[string]*loadgen.Client{
		"plain": {URL: url, Model: "sim", APIKey: plainKey, HTTP: httpClient, Speed: 1, Timeout: requestTimeout},
		"turns": {URL: url, Model: "sim", APIKey: turnsKey, HTTP: httpClient, Speed: 1, Timeout: requestTimeout, Header: header},
	}
	var mu sync.Mutex
	counts, all := map[string]int{}, 0
	count := func(key string) (more bool) {
		mu.Lock()
		defer mu.Unlock()
		if all++; all > turnsWarmup && all <= turnsWarmup+turnsCounted {
			counts[key]++
		}
		return all < turnsWarmup+turnsCounted
	}
	var clients sync.WaitGroup
	for i := range 2 * turnsClients {
		key, messages := "plain", newPlainTurn
		if i%2 == 1 {
			key, messages = "turns", newFewShotTurn
			if grows {
				messages = newGrowingTurn
			}
		}
		clients.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				q := newPrompt("sim", loadgen.Turn{Messages: messages(i, n), OutputTokens: turnsOutputTokens})
				response := senders[key].Send(ctx, q.request(true))
				r.verdict.checkAndCountUnmeasured(&q, response)
				if !count(key) {
					return
				}
			}
		})
	}
	clients.Wait()
	return counts["plain"], counts["turns"]
}

// turnsText returns a text of turnsPromptBytes that no other one begins like.
func turnsText(client, n int) string {
	start := fmt.Sprintf("%d of client %d at %d. ", n, client, time.Now().UnixNano())
	return start + strings.Repeat("another sentence. ", (turnsPromptBytes-len(start))/len("another sentence. "))
}

// newPlainTurn returns a first turn.
func newPlainTurn(client, n int) []loadgen.Message {
	return []loadgen.Message{{Role: "user", Content: turnsText(client, n)}}
}

// newFewShotTurn returns a prompt that begins with an example, as all of its key do.
func newFewShotTurn(client, n int) []loadgen.Message {
	return []loadgen.Message{
		{Role: "user", Content: "Classify: the sky is blue."}, {Role: "assistant", Content: "colour"},
		{Role: "user", Content: turnsText(client, n)},
	}
}

// newGrowingTurn returns the turn after n others of a client's conversation, or the first turn of the next conversation.
func newGrowingTurn(client, n int) []loadgen.Message {
	const turns = 4
	var messages []loadgen.Message
	text := strings.Repeat("a sentence. ", turnsPromptBytes/len("a sentence. "))
	for i := n - n%turns; i <= n; i++ {
		messages = append(messages, loadgen.Message{Role: "user", Content: fmt.Sprintf("%d of client %d. %s", i, client, text)})
		if i < n {
			messages = append(messages, loadgen.Message{Role: "assistant", Content: "Yes."})
		}
	}
	return messages
}
