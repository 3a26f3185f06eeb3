//go:build worlds

package replay

import (
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"os"
	"slices"
	"testing"
)

const (
	committedWorlds     = 40
	committedWorldsSeed = 7
	worldsFile          = "testdata/worlds.json"
	// maxWorse is by how much the geometric mean of a figure may exceed the committed one. Some worlds are near the load where queues
	// grow without end, so that small changes of a cost move the mean TTFT by a percent.
	maxWorse = 1.02
)

var updateWorlds = flag.String("update", "", "write "+worldsFile+": own figures only, or of all policies (`own` or all)")

// committedWorld has the figures of a world in worldsFile: those of prefix with the admission
// queue and without, and the lowest of the other policies. A figure that does not exist is 0.
type committedWorld struct {
	Number     int                   `json:"world"`
	Dimensions []Dimension           `json:"dimensions"`
	Figures    map[string][3]float64 `json:"figures"`       // by name: with the queue, without, the lowest of the others
	Best       map[string]string     `json:"best"`          // the policy that has the lowest
	Lost       int                   `json:"lost,omitzero"` // requests, of the policy that lost the fewest
}

// TestWorlds plays prefix in a fixed set of drawn worlds and compares its figures with the
// committed ones.
func TestWorlds(t *testing.T) {
	if *updateWorlds == "all" {
		playAndWriteWorlds(t)
		return
	}
	data, err := os.ReadFile(worldsFile)
	if err != nil {
		t.Fatal(err)
	}
	var committed []committedWorld
	if err := json.Unmarshal(data, &committed); err != nil {
		t.Fatal(err)
	}
	if len(committed) != committedWorlds {
		t.Fatalf("%s has %d worlds, want %d: run the test with -update all", worldsFile, len(committed), committedWorlds)
	}
	changes, toBest := map[string][]float64{}, map[string][]float64{}
	for i, c := range committed {
		w, err := DrawWorld(committedWorldsSeed, i, nil)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(w.Dimensions, c.Dimensions) {
			t.Fatalf("world %d is not the committed one: run the test with -update all", i)
		}
		r, err := w.RunOwn(t.Context())
		if err != nil {
			t.Fatal(w, err)
		}
		for name, now := range ownFigures(&r) {
			before := c.Figures[name]
			committed[i].Figures[name] = [3]float64{now[0], now[1], before[2]}
			for mode, label := range []string{"", ", without the queue"} {
				if now[mode] > 0 && before[mode] > 0 {
					changes[name+label] = append(changes[name+label], now[mode]/before[mode])
					toBest[name+label] = append(toBest[name+label], now[mode]/before[2])
				}
			}
		}
		if lost := r.Results[0].Lost; lost > c.Lost {
			t.Errorf("%v: %d requests were lost, and %d by another policy", w, lost, c.Lost)
		}
	}
	if *updateWorlds == "own" {
		writeWorlds(t, committed)
	}
	for name, ratios := range changes {
		change, best := geometricMeanOf(ratios), geometricMeanOf(toBest[name])
		t.Logf("%s: %.3f of the committed figures, %.3f of the best other policy in each world (%d worlds, at most %.3f of the committed)",
			name, change, best, len(ratios), slices.Max(ratios))
		if change > maxWorse {
			t.Errorf("%s is %.3f of the committed figures, more than %v", name, change, maxWorse)
		}
	}
}

func geometricMeanOf(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += math.Log(v)
	}
	return math.Exp(sum / float64(len(values)))
}

// ownFigures returns the figures of prefix with the queue and without, by name.
func ownFigures(r *WorldResult) map[string][3]float64 {
	figures := map[string][3]float64{}
	for _, f := range worldFigures[:3] {
		if f.streaming && !r.Streaming {
			continue
		}
		figures[f.name] = [3]float64{f.of(r.Results[0]), f.of(r.Results[1])}
	}
	return figures
}

func writeWorlds(t *testing.T, worlds []committedWorld) {
	data, err := json.MarshalIndent(worlds, "", "\t")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(worldsFile, append(data, '\n'), 0o644); err != nil {
		t.Fatal(err)
	}
}

// playAndWriteWorlds plays all policies as far as the file of -rivals does not have them, writes worldsFile and prints
// the report.
func playAndWriteWorlds(t *testing.T) {
	known, err := readKnownRivals(*drawnRivals)
	if err != nil {
		t.Fatalf("-rivals: %v", err)
	}
	var all []committedWorld
	var results []WorldResult
	for i := range committedWorlds {
		w, err := DrawWorld(committedWorldsSeed, i, nil)
		if err != nil {
			t.Fatal(err)
		}
		r, err := w.playAgainst(t, known, fmt.Sprintf("%d/%d", committedWorldsSeed, i))
		if err != nil {
			t.Fatal(w, err)
		}
		results = append(results, r)
		c := committedWorld{Number: i, Dimensions: w.Dimensions, Figures: ownFigures(&r), Best: map[string]string{},
			Lost: r.Results[0].Lost - r.lostMore()}
		for k := range worldFigures {
			f := &worldFigures[k]
			figures, ok := c.Figures[f.name]
			if !ok {
				continue
			}
			figures[2] = math.Inf(1)
			for _, s := range r.Results {
				if isPlainRival(s.Policy) && f.of(s) < figures[2] {
					figures[2], c.Best[f.name] = f.of(s), s.Policy
				}
			}
			c.Figures[f.name] = figures
		}
		all = append(all, c)
	}
	writeWorlds(t, all)
	if err := WriteWorldReport(os.Stdout, results); err != nil {
		t.Fatal(err)
	}
}
