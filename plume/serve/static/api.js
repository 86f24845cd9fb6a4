// The one way to the server. A newer question of the same name cancels the older one.

import { kept } from './store.js';

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function createApi() {
  const running = new Map(),
    remembered = new Map();
  let key = kept('sessionStorage', 'plume-key');

  const headers = () => ({ 'content-type': 'application/json', ...(key ? { authorization: `Bearer ${key}` } : {}) });

  async function send(path, body, signal) {
    const post = body === undefined ? {} : { method: 'POST', body: JSON.stringify(body) };
    const answer = await fetch(path, { headers: headers(), signal, ...post }).catch((error) => {
      throw error.name === 'AbortError' ? error : new ApiError('', 0); // nobody answers
    });
    if (answer.ok) return answer;
    const problem = await answer.json().catch(() => null);
    throw new ApiError(problem?.error?.message ?? answer.statusText, answer.status, problem?.error?.code);
  }

  function begin(name) {
    running.get(name)?.abort();
    const control = new AbortController();
    running.set(name, control);
    return control;
  }

  return {
    set key(value) {
      key = value;
      kept('sessionStorage', 'plume-key', value);
    },

    // resolves to undefined when a newer question took its place
    async ask(name, path, body) {
      const control = begin(name),
        question = path + JSON.stringify(body ?? null);
      if (remembered.has(question)) return remembered.get(question);
      try {
        const began = performance.now();
        const answer = await (await send(path, body, control.signal)).json();
        answer.ms = Math.round(performance.now() - began);
        if (control.signal.aborted) return undefined;
        if (body !== undefined) {
          remembered.set(question, answer);
          if (remembered.size > 60) remembered.delete(remembered.keys().next().value);
        }
        return answer;
      } catch (error) {
        if (error.name === 'AbortError') return undefined;
        throw error;
      } finally {
        if (running.get(name) === control) running.delete(name);
      }
    },

    // calls take(event) for each server-sent event until [DONE]; resolves to false when stopped
    async stream(name, path, body, take) {
      const control = begin(name);
      try {
        const reader = (await send(path, body, control.signal)).body.pipeThrough(new TextDecoderStream()).getReader();
        for (let rest = ''; ;) {
          const { done, value } = await reader.read();
          if (done) return true;
          const events = (rest + value).split('\n\n');
          rest = events.pop();
          for (const event of events) {
            const data = event
              .split('\n')
              .filter((line) => line.startsWith('data:'))
              .map((line) => line.slice(5).trim())
              .join('\n');
            if (data === '[DONE]') return true;
            if (!data) continue;
            const payload = JSON.parse(data);
            if (payload.error) throw new ApiError(payload.error.message, 500);
            take(payload);
          }
        }
      } catch (error) {
        if (error.name === 'AbortError') return false;
        throw error;
      } finally {
        if (running.get(name) === control) running.delete(name);
      }
    },

    stop(name) {
      running.get(name)?.abort();
    },
  };
}
