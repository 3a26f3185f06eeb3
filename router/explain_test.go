package router

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"warmroute/backends"
	"warmroute/lab/policies"
	"warmroute/prompt"
	"warmroute/router/decide"
)

// explanationOf is the part of an explanation that is about b.
func explanationOf(t *testing.T, e *Explanation, b *backends.Backend) BackendExplanation {
	t.Helper()
	at := slices.IndexFunc(e.Backends, func(x BackendExplanation) bool { return x.Name == b.Name })
	if at < 0 {
		t.Fatalf("nothing is said of %s", b.Name)
	}
	return e.Backends[at]
}

// says checks the sentence for each of parts.
func says(t *testing.T, e Explanation, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(e.Sentence, part) {
			t.Errorf("the sentence does not say %q: %s", part, e.Sentence)
		}
	}
}

func TestExplainMatch(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix")
	learnPrefillRate(r, testPrefillRate)
	first := ask(fleet, 1, 31)
	d := mustPick(t, r, first)
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed})
	again := ask(fleet, 1, 33)
	e := r.Explain(*again)
	holder := explanationOf(t, &e, d.Backend)
	if e.Choice != d.Backend.Name || e.Reason != ReasonPrefix || e.Blocks != 33 || e.PromptTokens != 33*64 || e.Queued != "" {
		t.Errorf("got %+v", e)
	}
	if holder.MatchedBlocks != 31 || holder.MatchedTokens != 31*64 || holder.UncachedTokens != 2*64 {
		t.Errorf("got %+v", holder)
	}
	if !holder.Candidate || holder.Score == nil || holder.Terms == nil {
		t.Errorf("got %+v", holder)
	}
	says(t, e, holder.Name+" holds 1,984 of 2,112 prompt tokens and responds soonest: 0.03 s against 0.29 s on b",
		"which is idle but holds nothing.")
}

func TestExplainPromptShorterThanABlock(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix")
	short := ask(fleet, 1, 0)
	short.Bytes = 8
	says(t, r.Explain(*short), "The prompt is shorter than a block of 256 bytes, so nothing of it is matched, and ")
	says(t, r.Explain(*ask(fleet, 1, 0)), "The request has no prompt to match, and ")
}

// The sentence, the header and the table round tokens alike.
func TestExplainRoundsTokens(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix")
	request := ask(fleet, 1, 10)
	request.Bytes += 3 // three quarters of a token
	e := r.Explain(*request)
	says(t, e, "No candidate holds any of its 641 prompt tokens")
	if uncached := e.Backends[0].UncachedTokens; e.PromptTokens != 641 || uncached != 640.75 {
		t.Errorf("%d prompt tokens and %v uncached ones, want 641 and 640.75", e.PromptTokens, uncached)
	}
}

func TestExplainMatchedBusy(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix")
	learnPrefillRate(r, testPrefillRate)
	d := mustPick(t, r, ask(fleet, 1, 30))
	d.RecordFirstEvent()
	d.Release(Outcome{End: Completed})
	long := ask(fleet, 1, 30)
	long.Blocks, long.Bytes = append(long.Blocks, ask(fleet, 2, 900).Blocks...), 930*256
	mustPick(t, r, long, fleet[1-d.Backend.Slot])
	e := r.Explain(*ask(fleet, 1, 30))
	if e.Reason != ReasonMatchedBusy || e.Choice == d.Backend.Name {
		t.Errorf("got %+v", e)
	}
	says(t, e, d.Backend.Name+" holds more, 1,920 of 1,920 prompt tokens, but has 57,600 tokens to compute before it and 1 in flight;",
		"responds soonest: 0.26 s against 13 s")
}

func TestExplainTie(t *testing.T) {
	r, fleet, _ := newFleet(t, 3, "prefix")
	req := ask(fleet, 1, 20)
	says(t, r.Explain(*req), "No candidate holds any", "costs the same as", "is preferred by a hash of the prompt")
	chosen := map[string]bool{}
	for n := range uint64(64) {
		req.Conversation = n + 1
		e := r.Explain(*req)
		says(t, e, "is preferred by a hash of the conversation")
		chosen[e.Choice] = true
	}
	if len(chosen) != len(fleet) {
		t.Errorf("64 conversations go to %d of 3 backends", len(chosen))
	}
}

// TestExplainAgreesWithPick asks twice before each of many picks, and in a second
// fleet never: both explanations are the same, what is explained is done, and both fleets do the same.
func TestExplainAgreesWithPick(t *testing.T) {
	for _, name := range policies.All().Names() {
		for _, queue := range []bool{false, true} {
			build := func() (*Router, []*backends.Backend, *clock) {
				return newFleet(t, 3, name, func(o *Options) {
					o.Rand = rand.NewPCG(5, 5)
					if queue {
						withQueue(o)
					}
				})
			}
			one, fleet, c := build()
			other, otherFleet, otherClock := build()
			var inFlight, otherInFlight []*Reservation
			chance := rand.New(rand.NewPCG(8, 8))
			for step := range 150 {
				key, n := chance.IntN(6), 1+chance.IntN(60)
				e := one.Explain(*ask(fleet, key, n))
				if again := one.Explain(*ask(fleet, key, n)); !reflect.DeepEqual(again, e) {
					t.Fatalf("%s, step %d: explained %+v, and then %+v", name, step, e, again)
				}
				w, o := submit(one, ask(fleet, key, n)), submit(other, ask(otherFleet, key, n))
				if w.waits() != (e.Queued != "") || w.waits() != o.waits() {
					t.Fatalf("%s, step %d: waits %v and %v, explained %q", name, step, w.waits(), o.waits(), e.Queued)
				}
				if w.waits() {
					w.queued.Cancel()
					o.queued.Cancel()
				} else {
					sentTo := w.d.Backend.Name
					if sentTo != e.Choice || w.d.Reason != e.Reason || w.d.MatchedBlocks != explanationOf(t, &e, w.d.Backend).MatchedBlocks {
						t.Fatalf("%s, step %d: explained %s for %s, sent to %s for %s", name, step, e.Choice, e.Reason, sentTo, w.d.Reason)
					}
					if sentTo != o.d.Backend.Name {
						t.Fatalf("%s, step %d: sent to %s, without Explain to %s", name, step, sentTo, o.d.Backend.Name)
					}
					inFlight, otherInFlight = append(inFlight, w.d), append(otherInFlight, o.d)
				}
				if len(inFlight) > 9 {
					inFlight[0].RecordFirstEvent()
					otherInFlight[0].RecordFirstEvent()
					inFlight[0].Release(Outcome{End: Completed, OutputTokens: 40})
					otherInFlight[0].Release(Outcome{End: Completed, OutputTokens: 40})
					inFlight, otherInFlight = inFlight[1:], otherInFlight[1:]
				}
				c.advance(30 * time.Millisecond)
				otherClock.advance(30 * time.Millisecond)
			}
			if _, err := json.Marshal(one.Explain(*ask(fleet, 1, 9))); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// accountsOf describes the accounts of all backends, and their health.
func accountsOf(r *Router, fleet []*backends.Backend, now time.Time) (text string) {
	for _, b := range fleet {
		text += fmt.Sprintf("%+v %+v\n", figuresOf(r, b, now), r.Status(b))
	}
	return text
}

func TestExplainHasNoSideEffects(t *testing.T) {
	r, fleet, c := newFleet(t, 3, "prefix", withQueue)
	d := mustPick(t, r, ask(fleet, 1, 20))
	c.advance(10 * time.Millisecond)
	version, accounts, inFlight := r.fleet.index.Version(), accountsOf(r, fleet, c.now), d.Backend.InFlight.Load()
	estimates, queued := *r.fleet.estimates, fmt.Sprint(*r.admission.queue)
	state := fmt.Sprintf("%+v", r.fleet.policy.Policy)
	for range 20 {
		first := ask(fleet, 1, 20)
		first.Turn = prompt.TurnFirst
		r.Explain(*first)
		r.Explain(*ask(fleet, 2, 200))
	}
	if r.fleet.index.Version() != version || accountsOf(r, fleet, c.now) != accounts || d.Backend.InFlight.Load() != inFlight ||
		!reflect.DeepEqual(estimates, *r.fleet.estimates) || fmt.Sprintf("%+v", r.fleet.policy.Policy) != state ||
		fmt.Sprint(*r.admission.queue) != queued {
		t.Error("Explain has changed something")
	}
}

func TestExplainFilters(t *testing.T) {
	r, fleet, c := newFleet(t, 9, "prefix", func(o *Options) { o.Breaker = BreakerSettings{Failures: 1, OpenTime: time.Minute} })
	for i, state := range []backends.State{backends.Down, backends.Draining} {
		fleet[i].SetState(state)
	}
	fleet[2].SetLoad(&backends.Load{Asleep: true, PolledAt: c.now})
	fleet[3].SetOptions(backends.Options{MaxInFlight: 1})
	fleet[3].InFlight.Add(1)
	except := func(b *backends.Backend) []*backends.Backend {
		return slices.DeleteFunc(slices.Clone(fleet), func(o *backends.Backend) bool { return o == b })
	}
	mustPick(t, r, ask(fleet, 1, 5), except(fleet[4])...).Release(Outcome{End: NotProcessed, Failed: true})
	mustPick(t, r, ask(fleet, 1, 5), except(fleet[5])...).Release(Outcome{End: NotProcessed, Stopping: true})
	fleet[6].SetLoad(&backends.Load{KVKnown: true, KVCacheUsage: 0.99, PolledAt: c.now})
	req := ask(fleet[:8], 1, 5)
	req.CatalogID = "sim"
	e := r.Explain(*req, fleet[7])
	for i, want := range []string{
		"is not ready", "is draining", "is asleep", "is at its max_in_flight limit", "has an open circuit breaker", "is about to stop", "",
		"was tried already", "does not list the model",
	} {
		if got := explanationOf(t, &e, fleet[i]).WhyNot; got != want {
			t.Errorf("b%d: got %q, want %q", i, got, want)
		}
	}
	if e.Choice != "b6" || e.Reason != ReasonOnly { // a full cache is the least of the troubles
		t.Errorf("got %s for %s", e.Choice, e.Reason)
	}
	says(t, e, "b6 is the only candidate", "b0 is not ready, b1 is draining, b2 is asleep", "and 3 more")
}

func TestExplainWithoutCandidates(t *testing.T) {
	const why = "No backend can accept it now: b0 is not ready, b1 is draining. "
	for _, c := range []struct {
		name   string
		change func(*Options)
		want   string
	}{
		{"queued", withQueue, why + "It would wait in the admission queue: no backend is ready."},
		{"refused", func(*Options) {}, why + "It would be refused: no backend is ready."},
	} {
		r, fleet, _ := newFleet(t, 2, "prefix", c.change)
		fleet[0].SetState(backends.Down)
		fleet[1].SetState(backends.Draining)
		if e := r.Explain(*ask(fleet, 1, 5)); e.Sentence != c.want || e.Choice != "" {
			t.Errorf("%s: got %s", c.name, e.Sentence)
		}
		fleet[0].SetState(backends.Ready)
		if e := r.Explain(*ask(fleet, 1, 5), fleet...); e.Refused == "" || e.Queued != "" {
			t.Errorf("%s, all tried: got %+v", c.name, e)
		}
	}
}

func TestExplainQueued(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix", withQueue)
	for i := range 2 {
		mustPick(t, r, ask(fleet, 10+i, 300))
	}
	e := r.Explain(*ask(fleet, 1, 200))
	if e.Queued != decide.BlockedByPrefill.String() || e.Choice == "" {
		t.Errorf("got %+v", e)
	}
	says(t, e, "It would wait in the admission queue, most likely for "+e.Choice+": its prefill queue is full.")
	waits(t, "the next", submit(r, ask(fleet, 2, 200)))
	if e := r.Explain(*ask(fleet, 1, 1)); e.Waiting != 1 || !strings.Contains(e.Queued, "other requests are queued") {
		t.Errorf("got %+v", e)
	}
	full := r.fleet.settings
	full.Queue.Requests = 1
	if err := configure(r, full); err != nil {
		t.Fatal(err)
	}
	if e := r.Explain(*ask(fleet, 1, 1)); e.Refused != ErrQueueFull.Error() || e.Queued != "" {
		t.Errorf("a full queue: got %+v", e)
	}
}

func TestRecordPlacement(t *testing.T) {
	r, fleet, _ := newFleet(t, 3, "prefix")
	if n := r.IndexPlacement(ask(fleet, 1, 30), fleet[2]); n != 30 {
		t.Errorf("%d blocks were taken in", n)
	}
	d := mustPick(t, r, ask(fleet, 1, 40))
	if d.Backend != fleet[2] || d.MatchedBlocks != 30 || d.entry.Prediction.QueuedAhead != 0 || d.Backend.InFlight.Load() != 1 {
		t.Errorf("sent to %s, of which it holds %d, behind %v tokens", d.Backend.Name, d.MatchedBlocks, d.entry.Prediction.QueuedAhead)
	}
	r.RemoveBackend(fleet[1])
	if n := r.IndexPlacement(ask(fleet, 1, 30), fleet[1]); n != 0 {
		t.Errorf("%d blocks on a backend that has left", n)
	}
}

func TestResetBackend(t *testing.T) {
	r, fleet, _ := newFleet(t, 2, "prefix", func(o *Options) { o.Breaker = BreakerSettings{Failures: 1, OpenTime: time.Minute} })
	r.IndexPlacement(ask(fleet, 1, 30), fleet[0])
	inFlight := mustPick(t, r, ask(fleet, 1, 30), fleet[1])
	mustPick(t, r, ask(fleet, 2, 5), fleet[1]).Release(Outcome{End: NotProcessed, Failed: true})
	r.fleet.estimates.RecordOutputLength(0, 9000, 1)
	was := r.ResetBackend(fleet[0])
	if was.Blocks != 30 || was.Breaker != BreakerOpen || was.Estimates.OutputTokens == defaultOutputTokens {
		t.Errorf("it says %+v", was)
	}
	state, _ := breakerOf(r, fleet[0])
	learned := r.Estimates()[0]
	if state != BreakerClosed || r.fleet.index.Len(0) != 0 || learned.OutputTokens != defaultOutputTokens {
		t.Errorf("left is %v, %d blocks, %+v", state, r.fleet.index.Len(0), r.Estimates()[0])
	}
	inFlight.RecordFirstEvent()
	inFlight.Release(Outcome{End: Completed})
	if n := fleet[0].InFlight.Load(); n != 0 {
		t.Errorf("%d in flight", n)
	}
	if again := r.ResetBackend(fleet[0]); again.Blocks != 0 || again.Breaker != BreakerClosed {
		t.Errorf("the second time it says %+v", again)
	}
}
