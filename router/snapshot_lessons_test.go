package router

import (
	"bytes"
	"encoding/binary"
	"math"
	"testing"
)

func TestASnapshotGivesBackWhatWasLearned(t *testing.T) {
	before := warm(t)
	for key := range 200 { // dense text, long answers, and a cache that holds less than it says
		d := mustPick(t, before.Router, ask(before.fleet[:1], key%100, 60))
		d.Release(Outcome{End: Completed, AnswerTokens: 700, PromptTokens: 60 * 256 / 3, CachedKnown: true})
	}
	want, fresh := before.Estimates(), newKept(t, 2).Estimates()
	if want[0].BytesPerToken == fresh[0].BytesPerToken || want[0].AnswerTokens == fresh[0].AnswerTokens || want[0].CapacityFactor == fresh[0].CapacityFactor {
		t.Fatalf("nothing was learned: %+v", want[0])
	}
	after := newKept(t, 2)
	if err := after.Read(bytes.NewReader(before.write(t))); err != nil {
		t.Fatal(err)
	}
	l := began()
	for _, b := range after.fleet {
		after.Snapshots.ObserveLoad(b, &l)
	}
	for slot, got := range after.Estimates() {
		if got.BytesPerToken != want[slot].BytesPerToken || got.AnswerTokens != want[slot].AnswerTokens ||
			got.CapacityFactor != want[slot].CapacityFactor || got.PrefillRate != want[slot].PrefillRate {
			t.Errorf("backend %d: %+v, want %+v", slot, got, want[slot])
		}
	}
	parts, _ := after.Router.IndexStats()
	if had, _ := before.Router.IndexStats(); parts[0].Capacity < had[0].Capacity*63/64 || parts[0].Capacity > had[0].Capacity*65/64 {
		t.Errorf("capacity %d, want about %d", parts[0].Capacity, had[0].Capacity)
	}
}

func TestLessonsThatMakeNoSenseAreNotTaken(t *testing.T) {
	l := newLessons()
	good := l.append(nil)
	f := func(what string, number int, x float64, want bool) {
		t.Helper()
		b := bytes.Clone(good)
		binary.LittleEndian.PutUint64(b[8*number:], math.Float64bits(x))
		got := newLessons()
		if got.recall(b) != want || !want && !bytes.Equal(got.append(nil), good) {
			t.Errorf("%s: taken %v, want %v", what, !want, want)
		}
	}
	const edge = 2 * reachBuckets
	f("nothing changed", edge, float64(reported), true)
	f("a prediction less than none", 0, -1, false)
	f("a share that is no number", reachBuckets, math.NaN(), false)
	f("without end", 3, math.Inf(1), false)
	f("beyond the last bucket", edge, reachBuckets, false)
	f("no tokens", edge+2, 0, false)
	f("bytes that are no text", edge+1, 1e9, false)
	f("answers of nothing", edge+3, 0, false)
	f("answers longer than any", edge+3, 1e7, false)
	f("speed unknown", edge+5, 0, true)
	f("known", edge+5, 20_000, true)
	f("standing still", edge+5, 0.1, false)
}
