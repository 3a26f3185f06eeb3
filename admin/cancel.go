package admin

import "net/http"

// cancel ends a request in flight.
func (h *Handler) cancel(w http.ResponseWriter, r *http.Request) {
	handle := r.PathValue("handle")
	if !h.proxy.Activity().Cancel(handle) {
		fail(w, http.StatusNotFound, "no request in flight has that handle; GET /api/state lists those that there are")
		return
	}
	h.account.forget()
	h.log.Info("request cancelled", "handle", handle, "by", r.RemoteAddr)
	reply(w, http.StatusOK, map[string]any{"cancelled": handle})
}
