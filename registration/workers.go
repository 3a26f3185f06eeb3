package registration

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"warmroute/backends"
	"warmroute/backends/control"
	"warmroute/config"
	"warmroute/fleet"
	"warmroute/httpapi"
	"warmroute/metrics"
)

const (
	// maxReadyWait is how long a caller waits until its replica is ready: vime gives up after 30 s.
	maxReadyWait = 25 * time.Second
	maxBodyBytes = 64 << 10
	maxURLBytes  = 1 << 10
	bodyTimeout  = 10 * time.Second

	addFailed = "ADD_WORKER_FAILED"
)

// addWorker serves POST /workers.
func (c *call) addWorker() {
	body, err := io.ReadAll(http.MaxBytesReader(c.w, c.r.Body, maxBodyBytes))
	if err != nil {
		c.writeInvalid(fmt.Sprintf("the body is incomplete, or longer than %d bytes", maxBodyBytes))
		return
	}
	given, err := parseWorker(body)
	if err != nil {
		c.writeInvalid(err.Error())
		return
	}
	added, err := c.registerAndWaitReady(given)
	if added == nil {
		c.writeUnlessRefused(err, func(message string) { writeError(c.w, http.StatusBadRequest, addFailed, message) })
		return
	}
	status := http.StatusOK
	if !added.Ready {
		status = http.StatusAccepted
	}
	httpapi.WriteJSON(c.w, status, added)
}

func (c *call) writeInvalid(message string) {
	c.Metrics.CountRegistration(metrics.RegistrationInvalid)
	writeError(c.w, http.StatusBadRequest, addFailed, message)
}

// addWorkerByQuery serves POST /add_worker?url=URL&worker_type=TYPE.
func (c *call) addWorkerByQuery() {
	query := c.r.URL.Query()
	var added *addedWorker
	role, err := roleOfType(query.Get("worker_type"))
	if err == nil {
		added, err = c.registerAndWaitReady(givenWorker{url: query.Get("url"), role: role})
	}
	switch {
	case added == nil:
		c.writeUnlessRefused(err, func(message string) { writeText(c.w, http.StatusBadRequest, message) })
	case !added.Ready:
		writeText(c.w, http.StatusAccepted, added.Message)
	default:
		writeText(c.w, http.StatusOK, added.Message)
	}
}

// givenWorker is a replica as the caller describes it.
type givenWorker struct {
	url, device string
	role        backends.Role
}

// parseWorker reads the body of POST /workers. Fields that it does not know, such as bootstrap_port, are for other routers.
func parseWorker(body []byte) (givenWorker, error) {
	var w struct {
		URL    string `json:"url"`
		Device string `json:"device"`
		Type   string `json:"worker_type"`
		APIKey string `json:"api_key"`
	}
	if json.Unmarshal(body, &w) != nil {
		return givenWorker{}, errors.New(`the body is not a JSON object such as {"url": "http://10.0.0.5:8000", "worker_type": "regular"}`)
	}
	if w.APIKey != "" {
		return givenWorker{}, errors.New("replicas with an api_key cannot be registered: list them in the configuration or in backends_file")
	}
	role, err := roleOfType(w.Type)
	if err != nil {
		return givenWorker{}, err
	}
	return givenWorker{w.URL, w.Device, role}, nil
}

// regularType is the type of workers for whole requests. Those of others are the names of their roles.
const regularType = "regular"

// roleOfType returns the role of a type of workers; "" is the regular type.
func roleOfType(name string) (backends.Role, error) {
	switch name {
	case "", regularType:
		return backends.RoleBoth, nil
	case backends.RolePrefill.String():
		return backends.RolePrefill, nil
	case backends.RoleDecode.String():
		return backends.RoleDecode, nil
	}
	return backends.RoleBoth, fmt.Errorf("unknown worker_type %.40q: use regular, prefill or decode", name)
}

// typeOfRole returns the type of workers with a role.
func typeOfRole(role string) string {
	if role == backends.RoleBoth.String() {
		return regularType
	}
	return role
}

// addedWorker is the response to a call that registers a replica. It has the fields of all routers.
type addedWorker struct {
	Success  bool    `json:"success"`
	Status   string  `json:"status"`
	Message  string  `json:"message"`
	WorkerID string  `json:"worker_id"`
	URL      string  `json:"url"`
	Location string  `json:"location"`
	Worker   *worker `json:"worker"`
	Ready    bool    `json:"-"`
}

// registerAndWaitReady adds a replica to the fleet, and waits for maxReadyWait until it is ready. A refused call is an error that is
// a *refusal.
func (c *call) registerAndWaitReady(w givenWorker) (*addedWorker, error) {
	given := w.url
	if given == "" {
		return nil, errors.New("url is missing; send one such as http://10.0.0.5:8000")
	}
	if len(given) > maxURLBytes {
		return nil, fmt.Errorf("url is longer than %d bytes", maxURLBytes)
	}
	// A registered URL is one process, whatever addresses its name has.
	settings, err := json.Marshal(map[string]string{"url": given, "device": w.device, "role": w.role.String(), "dns": "off"})
	if err != nil {
		return nil, err
	}
	b, err := config.ParseAddedBackend(settings)
	if err != nil {
		return nil, errors.New(strings.Join(config.ErrorLines(err), "; "))
	}
	u, err := b.ParseURL()
	if err != nil {
		return nil, err
	}
	byWildcard, refused := c.checkURL(u)
	if refused != nil {
		return nil, refused
	}
	b.RefuseLocal = byWildcard
	name, added, err := c.Fleet.Add(c.r.Context(), fleet.Registration{Backend: b, GivenURL: given, By: c.from.String(), At: time.Now()})
	if err != nil {
		return nil, err
	}
	result := "registered"
	if !added {
		result = "known already"
	}
	c.logAction("register", name, result)
	notStored := c.Fleet.WaitStored(c.r.Context())
	ready, reason := c.waitReady(name)
	response := &addedWorker{
		Success: true, Status: "accepted", Message: "Successfully added worker: " + given, Ready: ready,
		WorkerID: name, URL: given, Location: "/workers/" + url.PathEscape(name), Worker: c.findWorker(name),
	}
	if ready {
		c.Metrics.CountRegistration(metrics.RegistrationOK)
	} else {
		c.Metrics.CountRegistration(metrics.RegistrationNotReady)
		response.Message = "Added worker, which is not ready yet: " + given + ": " + reason
	}
	if notStored != nil {
		response.Message += "; " + notStored.Error()
	}
	return response, nil
}

// waitReady waits until a member of the fleet is ready, maxReadyWait at most. It does not wait if too many calls do.
func (c *call) waitReady(name string) (ready bool, reason string) {
	wait := maxReadyWait
	select {
	case c.waiting <- struct{}{}:
		defer func() { <-c.waiting }()
	default:
		wait = 0
	}
	ctx, cancel := context.WithTimeout(c.r.Context(), wait)
	defer cancel()
	conn := http.NewResponseController(c.w)
	_ = conn.SetReadDeadline(time.Time{}) // it would end the request
	defer func() { _ = conn.SetReadDeadline(time.Now().Add(bodyTimeout)) }()
	return c.Fleet.WaitReady(ctx, name)
}

// writeUnlessRefused writes why a replica was not registered, which write does unless the call is refused.
func (c *call) writeUnlessRefused(err error, write func(message string)) {
	if refused, ok := errors.AsType[*refusal](err); ok {
		c.refuse(refused)
		return
	}
	c.Metrics.CountRegistration(metrics.RegistrationInvalid)
	write(err.Error())
}

// removeWorker serves DELETE /workers/{id or URL}.
func (c *call) removeWorker() {
	name, err := c.deregister(c.namedWorker())
	switch {
	case errors.Is(err, fleet.ErrNotRegistered):
		writeError(c.w, http.StatusNotFound, "WORKER_NOT_FOUND", "no such worker is registered")
	case err != nil:
		writeError(c.w, http.StatusConflict, "REMOVE_WORKER_FAILED", err.Error())
	default:
		httpapi.WriteJSON(c.w, http.StatusOK, map[string]any{"success": true, "status": "accepted", "worker_id": name,
			"message": "Successfully removed worker: " + c.namedWorker()})
	}
}

// removeWorkerByQuery serves POST /remove_worker?url=URL.
func (c *call) removeWorkerByQuery() {
	given := c.r.URL.Query().Get("url")
	_, err := c.deregister(given)
	switch {
	case errors.Is(err, fleet.ErrNotRegistered):
		writeText(c.w, http.StatusNotFound, "no such worker is registered")
	case err != nil:
		writeText(c.w, http.StatusBadRequest, err.Error())
	default:
		writeText(c.w, http.StatusOK, "Successfully removed worker: "+given)
	}
}

// deregister removes a registered replica from the fleet; its requests may finish. It returns the name of its backend.
// That the removal could not be stored is in the log only: the callers' clients read no more than the status.
func (c *call) deregister(idOrURL string) (name string, err error) {
	name, err = c.Fleet.Remove(idOrURL, false)
	if err != nil {
		c.Metrics.CountRegistration(metrics.RegistrationInvalid)
		return "", err
	}
	c.Metrics.CountRegistration(metrics.RegistrationOK)
	c.logAction("deregister", name, "removed")
	_ = c.Fleet.WaitStored(c.r.Context())
	return name, nil
}

// worker describes a replica as other routers do.
type worker struct {
	ID             string  `json:"id"`
	URL            string  `json:"url"` // as it was registered
	ModelID        string  `json:"model_id"`
	Priority       int     `json:"priority"`
	Cost           float64 `json:"cost"`
	WorkerType     string  `json:"worker_type"`
	Healthy        bool    `json:"is_healthy"`
	Load           int64   `json:"load"` // requests in flight
	ConnectionMode string  `json:"connection_mode"`
}

func newWorker(id, url, role string) *worker {
	return &worker{ID: id, URL: url, ModelID: "unknown", Priority: 50, Cost: 1, WorkerType: typeOfRole(role), ConnectionMode: "http"}
}

// add adds what is known of a backend of the worker.
func (w *worker) add(b *backends.Backend) {
	w.Healthy = w.Healthy || b.State() == backends.Ready
	w.Load += b.KnownInFlight()
	if models := b.Models(); len(models) > 0 {
		w.ModelID = models[0].ID
	}
}

// workers returns the registered replicas, and then all others, each with its ranks. One that was registered is there
// from its registration on, ready or not, also if its backend is that of a name with the same address.
func (c *call) workers() []*worker {
	list, known := []*worker{}, map[string]*worker{} // by name, and by the address of a registered one
	for _, r := range c.Fleet.Registrations() {
		w := newWorker(r.ID(), r.GivenURL, r.Backend.Role)
		list, known[r.ID()], known[r.Address()] = append(list, w), w, w
	}
	for _, b := range c.Registry.All() {
		if b.Retiring() {
			continue
		}
		server := b.Server()
		member, _, _ := strings.Cut(server.Name, "@") // without the address of one that has several
		w := cmp.Or(known[server.Name], known[member], known[server.Address()])
		if w == nil {
			w = newWorker(server.Name, b.URL.String(), b.Options().Role.String())
			list, known[w.ID] = append(list, w), w
		}
		w.add(b)
	}
	return list
}

// findWorker returns the worker with an id or a URL, or nil.
func (c *call) findWorker(idOrURL string) *worker {
	for _, w := range c.workers() {
		if w.ID == idOrURL || w.URL == idOrURL {
			return w
		}
	}
	return nil
}

// workerStats has the numbers of all routers about the listed workers.
type workerStats struct {
	Workers int            `json:"total_workers"`
	Healthy int            `json:"healthy_workers"`
	Models  int            `json:"total_models"`
	Load    int64          `json:"total_load"`
	ByType  map[string]int `json:"by_type"`
	Regular int            `json:"regular_count"`
	Prefill int            `json:"prefill_count"`
	Decode  int            `json:"decode_count"`
}

func newWorkerStats(list []*worker) workerStats {
	prefill, decode := backends.RolePrefill.String(), backends.RoleDecode.String()
	s := workerStats{Workers: len(list), ByType: map[string]int{regularType: 0, prefill: 0, decode: 0}}
	models := map[string]bool{}
	for _, w := range list {
		s.ByType[w.WorkerType]++
		if w.Healthy {
			s.Healthy++
		}
		s.Load += w.Load
		models[w.ModelID] = true
	}
	s.Regular, s.Prefill, s.Decode = s.ByType[regularType], s.ByType[prefill], s.ByType[decode]
	s.Models = len(models)
	return s
}

// listWorkers serves GET /workers.
func (c *call) listWorkers() {
	list := c.workers()
	httpapi.WriteJSON(c.w, http.StatusOK, map[string]any{"workers": list, "total": len(list), "stats": newWorkerStats(list)})
}

// showWorker serves GET /workers/{id or URL}.
func (c *call) showWorker() {
	if w := c.findWorker(c.namedWorker()); w != nil {
		httpapi.WriteJSON(c.w, http.StatusOK, w)
		return
	}
	writeError(c.w, http.StatusNotFound, "WORKER_NOT_FOUND", "there is no such worker")
}

// listURLs serves GET /list_workers.
func (c *call) listURLs() {
	urls := []string{}
	for _, w := range c.workers() {
		urls = append(urls, w.URL)
	}
	httpapi.WriteJSON(c.w, http.StatusOK, map[string]any{"urls": urls})
}

// listLoads serves GET /get_loads.
func (c *call) listLoads() {
	type load struct {
		Worker string `json:"worker"`
		Load   int64  `json:"load"`
	}
	loads := []load{}
	for _, w := range c.workers() {
		loads = append(loads, load{w.URL, w.Load})
	}
	httpapi.WriteJSON(c.w, http.StatusOK, map[string]any{"workers": loads})
}

// flushCaches serves POST /flush_cache: it resets the prefix caches of all replicas, and what is known of them.
func (c *call) flushCaches() {
	request, err := control.ParseRequest("reset-cache", nil)
	if err != nil {
		writeError(c.w, http.StatusInternalServerError, "FLUSH_CACHE_FAILED", err.Error())
		return
	}
	ctx, cancel := context.WithTimeout(c.r.Context(), maxReadyWait)
	defer cancel()
	_ = http.NewResponseController(c.w).SetReadDeadline(time.Time{}) // it would end the request
	flushed, failed := []string{}, []map[string]string{}
	for _, result := range c.Control.Run(ctx, request, c.Registry.All()) {
		if result.OK {
			flushed = append(flushed, result.Backend)
			c.logAction("flush_cache", result.Backend, "ok")
		} else {
			failed = append(failed, map[string]string{"worker": result.Backend, "error": result.Error})
			c.logAction("flush_cache", result.Backend, "failed: "+result.Error)
		}
	}
	all := len(flushed) + len(failed)
	response := map[string]any{"status": "success", "message": fmt.Sprintf("Flushed the caches of %d of %d workers", len(flushed), all),
		"workers_flushed": len(flushed), "total_http_workers": all, "total_workers": all}
	status := http.StatusOK
	if len(failed) > 0 {
		status = http.StatusPartialContent
		response["status"], response["successful"], response["failed"] = "partial_success", flushed, failed
	}
	httpapi.WriteJSON(c.w, status, response)
}

func writeText(w http.ResponseWriter, status int, text string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(status)
	io.WriteString(w, text)
}

// writeError writes an error as the other routers do, with a code for programs.
func writeError(w http.ResponseWriter, status int, code, message string) {
	httpapi.WriteJSON(w, status, map[string]string{"error": message, "code": code, "src": "warmroute"})
}
