package admin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"warmroute/backends"
	"warmroute/backends/control"
)

// ControlReport is the response to a request for an action on backends.
type ControlReport struct {
	Action  string           `json:"action"`
	Results []control.Result `json:"results"`
	Error   *errorDetail     `json:"error,omitempty"` // some have failed
}

// controlBackends returns the handler that carries out an action on the backend in the path, or on those
// in the body, or on all.
func (h *Handler) controlBackends(action string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body) // readBody has bounded it
		if err != nil {
			writeError(w, http.StatusBadRequest, "the body is incomplete")
			return
		}
		request, err := control.ParseRequest(action, body)
		if err != nil {
			writeError(w, http.StatusBadRequest, err.Error())
			return
		}
		if list := h.selectBackends(w, r, request.Backends); list != nil {
			h.runAction(w, r, action, request, list)
		}
	}
}

// selectBackends returns the backend in the path, those of the names, or all without a name. If one does not
// exist, or there are none, it writes the error and returns nil.
func (h *Handler) selectBackends(w http.ResponseWriter, r *http.Request, names []string) (list []*backends.Backend) {
	if name := pathValue(r, "name"); name != "" {
		if names != nil {
			writeError(w, http.StatusBadRequest, "the path names a backend: leave out backends")
			return nil
		}
		names = []string{name}
	}
	if names == nil {
		list = slices.DeleteFunc(slices.Clone(h.Registry.All()), (*backends.Backend).Retiring)
	}
	for _, name := range names {
		found := h.findNamedBackends(w, name)
		if found == nil {
			return nil
		}
		for _, b := range found {
			if !slices.Contains(list, b) {
				list = append(list, b)
			}
		}
	}
	if len(list) == 0 {
		writeError(w, http.StatusNotFound, "there are no backends")
	}
	return list
}

// runAction carries out an action and writes a result for each backend. It ends early when the client
// disconnects or the listener closes.
func (h *Handler) runAction(w http.ResponseWriter, r *http.Request, action string, request *control.Request, list []*backends.Backend) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Time{}) // the request has timeouts of its own
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case <-h.streamsEnded:
			cancel()
		case <-ctx.Done():
		}
	}()
	report := ControlReport{Action: action, Results: h.Control.Run(ctx, request, list)}
	cancel()
	<-done
	h.cache.invalidate()
	failed := 0
	for _, result := range report.Results {
		var err error
		if !result.OK {
			failed++
			err = errors.New(result.Error)
		}
		h.logOperatorAction(r, action, err, append([]any{"backend", result.Backend}, request.Action.LogAttributes()...)...)
	}
	status := http.StatusOK
	if failed > 0 {
		status = http.StatusBadGateway
		report.Error = &errorDetail{fmt.Sprintf("%s failed on %d of %d backends", action, failed, len(report.Results)), "warmroute"}
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(h.timeout))
	writeJSON(w, status, report)
}
