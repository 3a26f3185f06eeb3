package metrics

import (
	"math"
	"slices"
	"time"
	"unicode/utf8"

	dto "github.com/prometheus/client_model/go"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"
)

const (
	// exemplarEvery is how often a bucket shows another request. In one that fills
	// fast, one a second is as good as any; in one that hardly does, each is shown.
	exemplarEvery = time.Second
	exemplarLabel = "request_id"
	// exemplarRunes is what OpenMetrics allows the names and values of an exemplar's
	// labels together.
	exemplarRunes = 128
)

// exemplar is a request that fell into a bucket.
type exemplar struct {
	id    string
	value time.Duration
	at    time.Time
}

// show keeps the request as the bucket's exemplar, if the one that it has is old. An
// id may be a client's: one that does not fit is left out.
func (h *Histogram) show(bucket int, d time.Duration, id string, now time.Time) {
	if old := h.latest[bucket].Load(); old != nil && now.Sub(old.at) < exemplarEvery {
		return
	}
	if id == "" || len(exemplarLabel)+utf8.RuneCountInString(id) > exemplarRunes || !utf8.ValidString(id) {
		return
	}
	h.latest[bucket].Store(&exemplar{id, d, now})
}

// readClassic writes the classic buckets, and the exemplars in them. The native
// buckets have the same ones, in the order of their time.
func (h *Histogram) readClassic(out *dto.Histogram, counts []uint64) {
	sum := uint64(0)
	for i, n := range counts {
		sum += n
		shown := h.latest[i].Load()
		if i == len(h.layout.classic) && shown == nil {
			break // +Inf is there without being said
		}
		bound := math.Inf(1)
		if i < len(h.layout.classic) {
			bound = h.layout.classic[i]
		}
		b := &dto.Bucket{CumulativeCount: proto.Uint64(sum), UpperBound: &bound}
		if shown != nil {
			b.Exemplar = shown.encoded()
			out.Exemplars = append(out.Exemplars, b.Exemplar)
		}
		out.Bucket = append(out.Bucket, b)
	}
	slices.SortFunc(out.Exemplars, func(a, b *dto.Exemplar) int { return a.Timestamp.AsTime().Compare(b.Timestamp.AsTime()) })
}

func (e *exemplar) encoded() *dto.Exemplar {
	return &dto.Exemplar{
		Label:     []*dto.LabelPair{{Name: proto.String(exemplarLabel), Value: &e.id}},
		Value:     proto.Float64(e.value.Seconds()),
		Timestamp: timestamppb.New(e.at),
	}
}
