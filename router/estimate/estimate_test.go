package estimate

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"testing"
)

func TestAverage(t *testing.T) {
	var a Average
	for range 50 {
		a.Add(10)
		a.Add(30)
	}
	if math.Abs(a.Value-20) > 1e-9 {
		t.Errorf("the mean of a hundred values is %.2f, want 20", a.Value)
	}
	for range 100 {
		a.Add(120)
	}
	if want := 120 - 100*math.Pow(0.99, 100); math.Abs(a.Value-want) > 1e-9 {
		t.Errorf("after a hundred more: %.2f, want %.2f", a.Value, want)
	}
	prior := NewAverage(250, 10)
	prior.Add(30)
	if prior.Value != 230 {
		t.Errorf("a prior worth ten values and one of 30: %.1f, want 230", prior.Value)
	}
}

func TestOldEvidenceDecays(t *testing.T) {
	c, far := newCapacity(), 1.0 // the replica's own figure
	look := func(missing float64) {
		var p predictions
		p.add(bucketOf(far), 1000, 1000)
		c.learn(&p, missing)
		c.update()
	}
	for range 5000 {
		look(0)
	}
	held := c.factor()
	for range 1000 {
		look(1000)
	}
	if c.factor() >= held {
		t.Errorf("the factor is %.2f and was %.2f, though the last 1,000 blocks were gone", c.factor(), held)
	}
}

func TestRestoreRejectsImplausibleNumbers(t *testing.T) {
	fresh := func() *Fleet {
		f := NewFleet(256, 1.2)
		f.Grow(1)
		return f
	}
	good := fresh().AppendBackend(nil, 0)
	f := func(what string, number int, x float64, want bool) {
		t.Helper()
		b := bytes.Clone(good)
		binary.LittleEndian.PutUint64(b[8*number:], math.Float64bits(x))
		got := fresh()
		if got.RestoreBackend(0, b) != want || !want && !bytes.Equal(got.AppendBackend(nil, 0), good) {
			t.Errorf("%s: taken %v, want %v", what, !want, want)
		}
	}
	const edge = 2 * bucketCount
	f("nothing changed", edge, float64(reportedBucket), true)
	f("a prediction less than none", 0, -1, false)
	f("a share that is no number", bucketCount, math.NaN(), false)
	f("without end", 3, math.Inf(1), false)
	f("beyond the last bucket", edge, bucketCount, false)
	f("no tokens", edge+2, 0, false)
	f("bytes that are no text", edge+1, 1e9, false)
	f("answers of nothing", edge+3, 0, false)
	f("answers longer than any", edge+3, 1e7, false)
	f("speed unknown", edge+5, 0, true)
	f("known", edge+5, 20_000, true)
	f("standing still", edge+5, 0.1, false)
}

func TestModelRatiosAreBounded(t *testing.T) {
	f := NewFleet(256, 1.2)
	f.Grow(1)
	for key := range 2 * maxModels {
		p := Prediction{Model: fmt.Sprint("m", key), Bytes: 1024, IsText: true}
		f.RecordCompletion(0, &p, Usage{PromptTokens: 256, CachedKnown: true}, CacheInfo{Alignment: 1})
	}
	if n := len(f.ratios.models); n != maxModels {
		t.Errorf("%d models are kept, want %d", n, maxModels)
	}
}
