package replay

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// meanAndSquaredVariation returns the mean of values and their squared coefficient of variation.
func meanAndSquaredVariation(values []float64) (mean, squared float64) {
	for _, v := range values {
		mean += v / float64(len(values))
	}
	for _, v := range values {
		squared += (v - mean) * (v - mean) / float64(len(values))
	}
	return mean, squared / (mean * mean)
}

func TestGamma(t *testing.T) {
	draw := rand.New(rand.NewPCG(1, 1))
	for _, shape := range []float64{0.05, 0.5, 1, 1.25, 7} {
		values := make([]float64, 400_000)
		for i := range values {
			values[i] = drawGamma(draw, shape)
		}
		mean, squared := meanAndSquaredVariation(values)
		near(t, "mean", mean, shape, 0.02)
		near(t, "squared coefficient of variation", squared, 1/shape, 0.04)
	}
}

func TestClientGaps(t *testing.T) {
	for _, want := range []float64{minSquaredVariation, 4, maxSquaredVariation} {
		c := client{draw: rand.New(rand.NewPCG(1, 2)), rate: 100, squaredVariation: want}
		const windows = 60
		all := c.arrivals(windows * clientsWindow)
		near(t, "requests", float64(len(all)), 100*windows*clientsWindow.Seconds(), 0.2)

		// In each window the gaps have the client's variation, and between windows their mean changes.
		var logRates []float64
		for k := range windows {
			var gaps []float64
			for i := 1; i < len(all); i++ {
				if begin := time.Duration(k) * clientsWindow; all[i-1] >= begin && all[i] < begin+clientsWindow {
					gaps = append(gaps, (all[i] - all[i-1]).Seconds())
				}
			}
			mean, squared := meanAndSquaredVariation(gaps)
			near(t, "squared coefficient of variation", squared, want, 0.15)
			logRates = append(logRates, -math.Log(mean))
		}
		mean, sum := 0.0, 0.0
		for _, x := range logRates {
			mean += x / windows
		}
		for _, x := range logRates {
			sum += (x - mean) * (x - mean) / windows
		}
		near(t, "sigma of the rates of the windows", math.Sqrt(sum), clientsWindowSigma, 0.25)
	}
}

// Of many clients with long gaps, as many send at the beginning as later.
func TestClientsBeginAnywhereInAGap(t *testing.T) {
	early, late := 0, 0
	for i := range uint64(4000) {
		c := client{draw: rand.New(rand.NewPCG(3, i)), rate: 0.01, squaredVariation: maxSquaredVariation}
		for _, at := range c.arrivals(2 * time.Minute) {
			if at < time.Minute {
				early++
			} else {
				late++
			}
		}
	}
	near(t, "requests in the first minute", float64(early), 4000*0.01*60, 0.15)
	near(t, "requests in the second minute", float64(late), 4000*0.01*60, 0.15)
}

func TestClients(t *testing.T) {
	w := Clients{Clients: 200, PromptTokens: 2000, OwnTokens: 1000, Output: 200, Rate: 20, For: time.Hour}
	r := mustMake(t, w, 8)
	near(t, "requests", float64(len(r.Open)), 72_000, 0.4) // the first client alone sends much of it
	if r.Total != len(r.Open) || r.Next != nil {
		t.Errorf("%d of %d requests are in the open loop", len(r.Open), r.Total)
	}
	sent := map[uint64]float64{}
	heads := map[uint64]uint64{} // of each client, the block that its prompt begins with
	for i := range uint64(w.Clients) {
		heads[mixBits(i)] = chainHash(0, i)
	}
	shared := 0.0
	for i, j := range r.Open {
		if i > 0 && j.At < r.Open[i-1].At || j.At >= w.For {
			t.Fatalf("request %d at %v after one at %v", i, j.At, r.Open[i-1].At)
		}
		sent[j.PromptKey]++
		if len(j.Blocks) > 0 && uint64(j.Blocks[0]) == heads[j.PromptKey] {
			shared++
		}
	}
	near(t, "share of requests that begin with their client's prompt", shared/float64(len(r.Open)), 1, 0.1)
	var counts []float64
	for _, n := range sent {
		counts = append(counts, n)
	}
	if middle, most := median(counts), slices.Max(counts); most < 15*middle {
		t.Errorf("the client that sends most sends %v requests, the median one %v", most, middle)
	}
}
