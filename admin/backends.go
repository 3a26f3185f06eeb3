package admin

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"warmroute/backends"
	"warmroute/config"
	"warmroute/fleet"
	"warmroute/router"
)

const (
	maxBackendBytes = 16 << 10 // of a backend's settings
	maxWait         = 10 * time.Minute
)

// BackendRow is one backend in the responses about backends.
type BackendRow struct {
	Name     string     `json:"name"`
	URL      string     `json:"url"`
	Address  string     `json:"address,omitempty"` // host:port that connections go to, if it is not that of the URL
	State    string     `json:"state"`
	Reason   string     `json:"reason,omitempty"` // why it is not ready
	Since    *time.Time `json:"since"`
	Source   string     `json:"source"`
	Role     string     `json:"role,omitempty"`    // "prefill" or "decode"; absent: both
	Version  string     `json:"version,omitempty"` // of vLLM; absent: unknown
	Device   string     `json:"device,omitempty"`  // that it shares with other backends
	InFlight int64      `json:"in_flight"`
	Server   string     `json:"server,omitempty"` // of a data-parallel rank: the backend that it is part of
	Rank     *int       `json:"rank,omitempty"`   // its number
	AddedBy  string     `json:"added_by,omitempty"`
	AddedAt  *time.Time `json:"added_at,omitempty"`
}

// BackendList is the response of GET /api/backends.
type BackendList struct {
	Backends []BackendRow `json:"backends"`
	Names    []fleet.Name `json:"names"`           // that are looked up
	Error    string       `json:"error,omitempty"` // of the last reload; empty: it was applied
}

// AddedBackend is the response of POST /api/backends.
type AddedBackend struct {
	Name   string `json:"name"`
	Added  bool   `json:"added"` // false: the fleet had it already
	Ready  bool   `json:"ready"`
	Reason string `json:"reason,omitempty"` // why it is not ready
	// Warning says why it is not stored; empty: it is, or there is no store.
	Warning string `json:"warning,omitempty"`
}

// RemovedBackend is the response of DELETE /api/backends/{name}.
type RemovedBackend struct {
	Backend string `json:"backend"`
	Removed bool   `json:"removed"` // false: its last requests are in flight
	Warning string `json:"warning,omitempty"`
}

// ChangedBackend is the response of a drain and of its end.
type ChangedBackend struct {
	Backend  string `json:"backend"`
	InFlight int64  `json:"in_flight"`
	State    string `json:"state"`
	Warning  string `json:"warning,omitempty"`
}

func (h *Handler) listBackends(w http.ResponseWriter, _ *http.Request) {
	list := BackendList{Backends: h.backendRows(), Names: h.Fleet.Names(), Error: h.Fleet.ReloadError()}
	writeJSON(w, http.StatusOK, list)
}

// backendRows returns the rows of all backends, without removed ones whose name was reused.
func (h *Handler) backendRows() []BackendRow {
	rows, added := []BackendRow{}, h.registrations()
	for _, b := range h.Registry.All() {
		if h.Registry.Find(b.Name) != b {
			continue
		}
		rows = append(rows, h.newBackendRow(b, added))
	}
	return rows
}

// newBackendRow returns the row of a backend, or of a server whose ranks are backends.
func (h *Handler) newBackendRow(b *backends.Backend, added map[string]fleet.Registration) BackendRow {
	c := h.condition(b)
	row := BackendRow{
		Name: b.Name, URL: b.URL.String(), Address: b.Addr, State: string(c.State), Reason: c.Reason, Since: timeOrNull(c.Since),
		Source: b.Options().Source.String(), Role: roleName(b), Version: b.Version(), Device: b.Options().Device, InFlight: b.CountInFlight(),
	}
	if rank, ok := b.Engine(); ok {
		row.Server, row.Rank = b.Server().Name, &rank
	}
	if r, ok := findRegistration(b, added); ok {
		row.AddedBy, row.AddedAt = r.By, timeOrNull(r.At)
	}
	return row
}

// condition returns the state that operators see of a backend. That of a server whose ranks are backends is theirs if they
// have the same one, else that of its checks.
func (h *Handler) condition(b *backends.Backend) router.Condition {
	parts := b.Parts()
	c := h.Router.Status(parts[0]).Condition
	for _, part := range parts[1:] {
		if h.Router.Status(part).Condition.State != c.State {
			s := b.Status()
			return router.Condition{State: router.ConditionState(s.State.String()), Since: s.Since, Reason: s.Reason}
		}
	}
	return c
}

// roleName returns the role of a backend that is for one part of requests; "" of others.
func roleName(b *backends.Backend) string {
	if role := b.Options().Role; role != backends.RoleBoth {
		return role.String()
	}
	return ""
}

// registrations returns the replicas that were added, by name.
func (h *Handler) registrations() map[string]fleet.Registration {
	added := map[string]fleet.Registration{}
	for _, r := range h.Fleet.Registrations() {
		added[r.Backend.Name] = r
	}
	return added
}

// findRegistration returns the registration that added a backend; false if it came from elsewhere.
func findRegistration(b *backends.Backend, added map[string]fleet.Registration) (r fleet.Registration, ok bool) {
	if b.Options().Source != backends.FromRegistration {
		return r, false
	}
	if r, ok = added[b.Server().Name]; ok {
		return r, true
	}
	member, _, _ := strings.Cut(b.Server().Name, "@") // an address of a name
	r, ok = added[member]
	return r, ok
}

func (h *Handler) showBackend(w http.ResponseWriter, r *http.Request) {
	b := h.findBackend(w, r)
	if b == nil {
		return
	}
	writeJSON(w, http.StatusOK, h.newBackendRow(b, h.registrations()))
}

// addBackend adds a replica, and waits for ?wait= until it is ready.
func (h *Handler) addBackend(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBackendBytes))
	if err != nil {
		writeError(w, http.StatusBadRequest, "the body is incomplete, or longer than 16 KiB")
		return
	}
	wait, ok := waitParameter(w, r)
	if !ok {
		return
	}
	b, err := config.ParseAddedBackend(body)
	if err != nil {
		writeError(w, http.StatusBadRequest, strings.Join(config.ErrorLines(err), "; "))
		return
	}
	name, added, err := h.Fleet.Add(r.Context(), fleet.Registration{Backend: b, GivenURL: b.URL, By: r.RemoteAddr, At: time.Now(),
		Operator: true})
	if err != nil {
		writeError(w, http.StatusConflict, err.Error())
		return
	}
	h.cache.invalidate()
	h.logOperatorAction(r, "add", nil, "backend", name, "url", b.URL, "added", added)
	out := AddedBackend{Name: name, Added: added, Warning: h.waitStored(r.Context())}
	ctx, cancel := context.WithTimeout(r.Context(), wait)
	defer cancel()
	out.Ready, out.Reason = h.Fleet.WaitReady(ctx, name)
	status := http.StatusOK
	switch {
	case !out.Ready:
		status = http.StatusAccepted
	case added:
		status = http.StatusCreated
	}
	h.cache.invalidate()
	writeJSON(w, status, out)
}

// removeBackend removes a replica that was added. Its requests may finish; ?wait= waits until it is gone.
func (h *Handler) removeBackend(w http.ResponseWriter, r *http.Request) {
	wait, ok := waitParameter(w, r)
	if !ok {
		return
	}
	name, err := h.Fleet.Remove(pathValue(r, "name"), true)
	switch {
	case errors.Is(err, fleet.ErrNotRegistered):
		if h.findBackend(w, r) != nil {
			writeError(w, http.StatusConflict, "this backend is an address of a name, or is being removed already")
		}
		return
	case err != nil:
		writeError(w, http.StatusConflict, err.Error())
		return
	}
	h.cache.invalidate()
	h.logOperatorAction(r, "remove", nil, "backend", name)
	warning := h.waitStored(r.Context())
	ctx, cancel := context.WithTimeout(r.Context(), wait)
	defer cancel()
	gone := h.Fleet.WaitRemoved(ctx, name)
	h.cache.invalidate()
	writeJSON(w, http.StatusOK, RemovedBackend{Backend: name, Removed: gone, Warning: warning})
}

// waitStored waits until changes of the fleet are stored, and returns a warning if they cannot be.
func (h *Handler) waitStored(ctx context.Context) (warning string) {
	if err := h.Fleet.WaitStored(ctx); err != nil {
		return err.Error()
	}
	return ""
}

// waitParameter returns the duration in ?wait=, 0 if there is none, and lets the response take as long. If it
// is invalid, it writes the error and returns false.
func waitParameter(w http.ResponseWriter, r *http.Request) (wait time.Duration, ok bool) {
	query, err := url.ParseQuery(r.URL.RawQuery)
	text := query.Get("wait")
	if err == nil && text != "" {
		wait, err = time.ParseDuration(text)
	}
	if err != nil || wait < 0 || wait > maxWait {
		writeError(w, http.StatusBadRequest, fmt.Sprintf("wait must be a duration from 0s to %v, such as 30s", maxWait))
		return 0, false
	}
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(wait + requestTimeout))
	return wait, true
}

// waitIdle waits until no request of this proxy is in flight on the backends, or for at most wait.
func (h *Handler) waitIdle(ctx context.Context, list []*backends.Backend, wait time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for _, b := range list {
		h.Fleet.WaitIdle(ctx, b)
	}
}
