package admin

import (
	"compress/gzip"
	"net/http"
	"slices"
	"strings"
	"time"

	"warmroute/proxy/recorder"
	"warmroute/router"
	"warmroute/router/step"
)

// recordingWriteTimeout is how long a client may take to read a recording.
const recordingWriteTimeout = time.Minute

// RecordingHeader is the first line of the recording that GET /api/recording returns: with the fleet, so that the
// traffic can be replayed on one like it.
type RecordingHeader struct {
	recorder.Header
	Now      time.Time         `json:"now"`
	Cut      bool              `json:"cut"` // recording.memory has no room for all of the last hour
	Policy   string            `json:"policy"`
	Backends []RecordedBackend `json:"backends"`
}

// RecordedBackend is what a replay needs to know of a backend.
type RecordedBackend struct {
	Ready    bool       `json:"ready"`
	Device   string     `json:"device,omitempty"` // that it shares with other backends
	Role     string     `json:"role,omitempty"`   // "prefill" or "decode"; absent: both
	KVTokens int        `json:"kv_tokens"`        // size of its cache, as reported and learned; 0: unknown
	Step     step.Model `json:"step"`             // as learned
	Models   []uint64   `json:"models"`           // numbers of those in the recording that it serves
}

// serveRecording returns what the proxy has recorded in memory, one JSON object per line.
func (h *Handler) serveRecording(w http.ResponseWriter, r *http.Request) {
	var recent *recorder.Recent
	if h.Recorder != nil {
		recent = h.Recorder.Recent()
	}
	if recent == nil {
		writeError(w, http.StatusNotFound, "no requests are recorded in memory: set recording.memory and restart")
		return
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(recordingWriteTimeout)) // as in setTimeouts
	w.Header().Set("Content-Type", "application/x-ndjson")
	w.Header().Set("Vary", "Accept-Encoding")
	header := h.recordingHeader(recent)
	if !strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
		_ = recent.WriteLines(w, header) // an error of a write means that the client has left
		return
	}
	w.Header().Set("Content-Encoding", "gzip")
	zip, _ := gzip.NewWriterLevel(w, gzip.BestSpeed) // fails for other levels only
	if recent.WriteLines(zip, header) == nil {
		_ = zip.Close()
	}
}

// recordingHeader describes the fleet as it is now, with the models of a recording.
func (h *Handler) recordingHeader(recent *recorder.Recent) RecordingHeader {
	header := RecordingHeader{Header: recent.Header, Now: time.Now().UTC(), Cut: recent.Cut, Policy: h.Router.Policy(),
		Backends: []RecordedBackend{}}
	catalog, estimates := h.Registry.Catalog(), h.Router.Estimates()
	for _, b := range h.Registry.All() {
		if h.Registry.Find(b.Name) != b || b.Slot >= len(estimates) || estimates[b.Slot].Backend != b {
			continue
		}
		learned := &estimates[b.Slot]
		backend := RecordedBackend{
			Ready: h.Router.Status(b).Condition.State == router.Ready, Device: b.Options().Device, Role: roleName(b), Step: learned.Step,
			Models: []uint64{},
		}
		if l := b.Load(); l != nil {
			backend.KVTokens = int(float64(l.CacheTokens) * learned.CapacityFactor)
		}
		for _, m := range catalog.Models {
			entry, _ := catalog.Find(m.ID)
			number, recorded := recent.Models[catalog.EngineModel(m.ID)]
			if recorded && slices.Contains(entry.Backends, b) && !slices.Contains(backend.Models, number) { // it may have aliases
				backend.Models = append(backend.Models, number)
			}
		}
		header.Backends = append(header.Backends, backend)
	}
	return header
}
